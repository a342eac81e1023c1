"""Defines the settings of the store: where chunks are kept, how, and how many."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import ByteSize, Field, SecretStr, field_validator
from pydantic_settings import BaseSettings

from kvlinker.base import machine
from kvlinker.base.types.chunks import Eviction
from kvlinker.settings.values import FromJson

CATALOG_FILE = "catalog.sqlite"
"""The catalog's file in the state directory."""

_SQLITE = "sqlite:///"
"""The beginning of URLs of files: the path follows, which begins with a slash if it is absolute."""

_RAW = "raw"
"""The codec that changes nothing. Settings without another codec need neither those nor torch."""

SHARED_TIER_SETTINGS = ("redis_url", "redis_prefix", "object_url", "object_space")


class StorageSettings(BaseSettings):
    """The tiers that hold chunks, the form of these, and the quotas of tenants."""

    state_dir: Path = Field(
        default=Path("~/.local/share/kvlinker"),
        description="Where chunk caches and the catalog live.",
    )
    catalog_url: SecretStr | None = Field(
        default=None,
        description=(
            "PostgreSQL database in which servers share one catalog:"
            " postgresql://user:password@host:5432/database; or a file: sqlite:///path. A file in"
            " state_dir by default."
        ),
    )
    device_memory: ByteSize | None = Field(
        default=None,
        description=(
            "Device tier budget, if the model's device has its own memory; by default a tenth"
            " of what is free on CUDA."
        ),
    )
    host_memory: ByteSize = Field(
        default_factory=lambda: ByteSize(machine.memory() // 4), description="Host tier budget."
    )
    disk_space: ByteSize = Field(default=ByteSize(20 * 2**30), description="Disk tier budget.")
    disk_codec: str = Field(
        default=_RAW,
        description="How KV is written to disk: raw, int8, int4, or compressed as raw+zstd …",
    )
    eviction: Eviction = Field(
        default="lru",
        description=(
            "What device, host and disk tier give up first: least recently used chunks, or least"
            " reused ones."
        ),
    )
    redis_url: SecretStr | None = Field(
        default=None,
        description=(
            "Redis through which servers share chunk caches: redis://[user:password@]host:port/0."
            " Its maxmemory is the tier's budget; an empty URL turns the tier off."
        ),
    )
    redis_codec: str = Field(default=_RAW, description="How KV is written to Redis, as disk_codec.")
    redis_prefix: str = Field(
        default="kvlinker",
        min_length=1,
        description="What all of kvlinker's keys in Redis begin with.",
    )
    object_url: SecretStr | None = Field(
        default=None,
        description="Object store through which servers share chunk caches: s3://bucket/folder.",
    )
    object_space: ByteSize = Field(
        default=ByteSize(100 * 2**30), description="Object tier budget, for all servers."
    )
    object_codec: str = Field(
        default=_RAW, description="How KV is written to the object store, as disk_codec."
    )

    tiers: FromJson[dict[str, dict[str, Any]]] = Field(
        default={},
        repr=False,
        description='Tiers of other packages, with their options: {"NAME": {"OPTION": …}}.',
    )

    tenant_quota_bytes: ByteSize | None = Field(
        default=None,
        description=(
            "KV that each tenant may keep, as computed, each chunk once; no limit by default."
        ),
    )
    tenant_quota_caches: int | None = Field(
        default=None,
        ge=0,
        description="Context caches that each tenant may keep; no limit by default.",
    )
    tenant_quota_pinned_bytes: ByteSize | None = Field(
        default=None,
        description=(
            "KV that each tenant may pin, as computed, each chunk once; no limit by default."
        ),
    )

    encryption_key: SecretStr | None = Field(
        default=None,
        description=(
            "Encrypts stored data: 32 random bytes in base64 or hex. Best given as a variable."
        ),
    )

    search: Literal["auto", "on", "off"] = Field(
        default="auto",
        description=(
            "Index chunks' texts, in plain, to be searched; auto: unless they are encrypted."
        ),
    )

    @property
    def catalog_place(self) -> Path | str:
        """The catalog's file, or the URL of its database."""
        if self.catalog_url is None:
            return self.state_dir / CATALOG_FILE
        url = self.catalog_url.get_secret_value()
        return Path(url.removeprefix(_SQLITE)) if url.startswith(_SQLITE) else url

    @property
    def searchable(self) -> bool:
        """True if chunks' texts are indexed to be searched."""
        return self.search == "on" or (self.search == "auto" and self.encryption_key is None)

    @field_validator("redis_url")
    @classmethod
    def _no_redis(cls, value: SecretStr | None) -> SecretStr | None:
        return value or None

    @field_validator("catalog_url")
    @classmethod
    def _known_database(cls, value: SecretStr | None) -> SecretStr | None:
        known = (_SQLITE, "postgresql://", "postgres://")
        if value is not None and not value.get_secret_value().startswith(known):
            raise ValueError(f"it must begin with one of {', '.join(known)}")
        return value

    @field_validator("state_dir")
    @classmethod
    def _expand(cls, value: Path) -> Path:
        try:
            return value.expanduser()
        except RuntimeError:
            raise ValueError("that home folder is not known: give an absolute path") from None

    @field_validator("disk_codec", "redis_codec", "object_codec")
    @classmethod
    def _known_codec(cls, value: str) -> str:
        if value == _RAW:
            return value
        from kvlinker.store.format.codecs import known_codecs  # which needs torch

        known = known_codecs()
        if value not in known:
            raise ValueError(f"it must be one of {', '.join(known)}")
        return value
