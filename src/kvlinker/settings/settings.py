"""Defines the settings of a kvlinker process, each with its default, what it may be, and what it
does."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    SecretStr,
    ValidationInfo,
    field_validator,
)
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from kvlinker.base import machine
from kvlinker.base.errors import InvalidRequestError, PolicyError
from kvlinker.base.types.chunks import Eviction, GenerationContext
from kvlinker.base.types.tenants import SHARED_TENANT, Quota, Quotas, tenant_of_key
from kvlinker.linking import parse_policy

BUNDLED_MODEL = Path(__file__).parents[1] / "models" / "reader"
VARIABLE_PREFIX = "KVLINKER_"
CONFIG_FILE_VARIABLE = "KVLINKER_CONFIG"
SHARED_TIER_SETTINGS = ("redis_url", "redis_space", "redis_prefix", "object_url", "object_space")

WeightFormat = Literal["auto", "bf16", "int8", "int4"]
"""How the weights of a model's linear layers are held: ``auto`` in the model's dtype, ``int8`` and
``int4`` in so many bits."""


def _split_commas(value: object) -> object:
    return (
        [part.strip() for part in value.split(",") if part.strip()]
        if isinstance(value, str)
        else value
    )


def _parse_share(value: object) -> object:
    """Read a percentage, such as ``1%``, as a share."""
    if isinstance(value, str) and value.strip().endswith("%"):
        try:
            return float(value.strip().removesuffix("%")) / 100
        except ValueError:
            raise ValueError("it must be a share such as 1% or 0.01") from None
    return value


Share = Annotated[float, BeforeValidator(_parse_share)]
"""A share from 0 to 1, which may be written in percent."""


def _parse_json(value: object) -> object:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error}") from error


_NEEDED = {
    "audit_tokens": "audit",
    "audit_log": "audit",
    "audit_log_text": "audit_log",
    "quality_target": "audit",
    "quality_policies": "quality_target",
    "quality_per_tenant": "quality_target",
}
"""The setting without which another one has no effect."""


class TenantQuota(BaseModel):
    """The limits on what one tenant may keep; None for the limit that all tenants have by
    default."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    bytes: ByteSize | None = None
    caches: int | None = Field(default=None, ge=0)
    pinned_bytes: ByteSize | None = None


class Settings(BaseSettings):
    """Everything that can be configured. Sizes take units, such as ``4GiB``."""

    model_config = SettingsConfigDict(env_prefix=VARIABLE_PREFIX, extra="forbid", frozen=True)

    model: str = Field(
        default=str(BUNDLED_MODEL),
        description="Local path or Hugging Face hub id; the shipped model by default.",
    )
    served_model_name: str | None = Field(
        default=None, description="Name in the API; the model's own by default."
    )
    engine: Literal["embedded", "vllm"] = Field(
        default="embedded", description="What runs the model: embedded, vllm."
    )
    vllm_options: Annotated[dict[str, Any], NoDecode, BeforeValidator(_parse_json)] = Field(
        default={}, description='vLLM\'s own engine options, as JSON: {"tensor_parallel_size": 2}.'
    )
    on_engine_failure: Literal["exit", "restart"] = Field(
        default="exit",
        description=(
            "When the engine has failed, as after a kill of vLLM's process: end the server with"
            " code 3, or start the engine again."
        ),
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="bfloat16 where the hardware multiplies it, else float32."
    )
    weights: WeightFormat = Field(
        default="auto",
        description="Format of the decoder layers' weights: auto (as dtype), bf16, int8, int4.",
    )
    device: str = Field(
        default="auto", description="cpu, cuda, cuda:1, …; auto takes CUDA when present."
    )
    trust_remote_code: bool = Field(
        default=False, description="Run code that comes with the model."
    )
    chat_template: str | None = Field(
        default=None, description="Jinja text in place of the tokenizer's own."
    )
    system_prompt: str | None = Field(
        default=None, description="Stands before conversations that bring none."
    )
    generation_config: Literal["auto", "off"] = Field(
        default="auto",
        description=(
            "Sampling parameters that requests leave out are the model's own recommendation."
        ),
    )
    max_answer_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Most tokens of an answer; the rest of the context window by default.",
    )

    policy: str = Field(
        default="query-5-sensitive", description="Linking policy of requests that name none."
    )
    generation_context: GenerationContext = Field(
        default=GenerationContext.PREFIX,
        description="What stands before chunks that name none: alone, bos, prefix.",
    )
    chunk_scores: bool = Field(
        default=True,
        description=(
            "Collect chunks' attention scores and sensitivity; cachecraft, h2o and"
            " query-…-sensitive use them."
        ),
    )
    max_variants: int = Field(
        default=64,
        ge=0,
        description="Variants of chunks that are kept for cachecraft and prefix policies; 0: none.",
    )

    implicit: Literal["auto", "marked", "off"] = Field(
        default="marked",
        description=(
            "Texts that become chunks without an id: marked (documents, and parts with"
            " cache_control), auto (also long ones that come again, and known ones inside others),"
            " off."
        ),
    )
    implicit_policy: str | None = Field(
        default=None,
        description="Linking policy of prompts none of whose chunks has an id; policy by default.",
    )
    implicit_ttl: float = Field(
        default=3600.0,
        gt=0,
        description="Seconds that chunks without an id live from their last use.",
    )
    implicit_caches: int = Field(
        default=1000,
        ge=0,
        description="Most chunks without an id that a tenant keeps; those used last stay.",
    )

    max_model_len: int | None = Field(
        default=None, ge=8, description="Tokens; the model's own limit by default."
    )
    kv_slots: int | None = Field(default=None, ge=16, description="Tokens that the KV pool holds.")
    prefix_cache: Literal["on", "off"] = Field(
        default="on", description="Reuse what requests computed in later ones that begin alike."
    )
    max_step_tokens: int = Field(
        default=2048, ge=1, description="Most tokens computed in one step."
    )
    max_running: int = Field(default=64, ge=1, description="Most requests computed in one step.")
    max_waiting: int = Field(default=256, ge=1, description="Longer queues answer 429.")
    slo_tpot: float | None = Field(
        default=None,
        gt=0,
        description=(
            "Most milliseconds per token of answers under way: prompts beside them are computed in"
            " pieces that fit; by default 2.25 times what a step takes without prompts."
        ),
    )
    slo_ttft: float | None = Field(
        default=None,
        gt=0,
        description=(
            "Requests that would wait longer for their first token, in seconds, answer 429."
        ),
    )
    threads: int | None = Field(
        default=None, ge=1, description="CPU threads for the model; all that there are by default."
    )

    native_attention: bool = Field(
        default=True,
        description=(
            "Compile code for attention, norms and products with weights where the CPU multiplies"
            " bfloat16."
        ),
    )

    state_dir: Path = Field(
        default=Path("~/.local/share/kvlinker"),
        description="Where chunk caches and the catalog live.",
    )
    device_memory: ByteSize | None = Field(
        default=None,
        description=(
            "Device tier budget, where the model's device has memory of its own; by default a tenth"
            " of what is free on CUDA."
        ),
    )
    host_memory: ByteSize = Field(
        default_factory=lambda: ByteSize(machine.memory() // 4), description="Host tier budget."
    )
    disk_space: ByteSize = Field(default=ByteSize(20 * 2**30), description="Disk tier budget.")
    disk_codec: str = Field(
        default="raw",
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
        ),
    )
    redis_space: ByteSize = Field(
        default=ByteSize(4 * 2**30), description="Redis tier budget, for all servers."
    )
    redis_codec: str = Field(
        default="raw", description="How KV is written to Redis, as disk_codec."
    )
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
        default="raw", description="How KV is written to the object store, as disk_codec."
    )

    tiers: Annotated[dict[str, dict[str, Any]], NoDecode, BeforeValidator(_parse_json)] = Field(
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
            "Encrypts what is stored: 32 random bytes in base64 or hex. Best given as a variable."
        ),
    )

    search: Literal["auto", "on", "off"] = Field(
        default="auto",
        description=(
            "Index chunks' texts, in plain, to be searched; auto: unless they are encrypted."
        ),
    )

    audit: Share = Field(
        default=0.0,
        ge=0,
        le=1,
        description=(
            "Share of answers, such as 1%, that are compared with the full computation in idle"
            " time."
        ),
    )
    audit_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Most tokens that the audit computes in an hour; no limit by default.",
    )
    audit_log: Path | None = Field(
        default=None,
        description="File that gets a line of JSON for each compared answer: hashes and figures.",
    )
    audit_log_text: bool = Field(
        default=False, description="Write the texts of prompts and answers there, too."
    )

    quality_target: Share | None = Field(
        default=None,
        gt=0.5,
        lt=1,
        description=(
            "Share of answers, such as 0.98, that are to agree with the full computation: the"
            " default policy's number follows what the audit finds."
        ),
    )
    quality_policies: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_commas)] = Field(
        default=(),
        description=(
            "Policies that it may become, the cheapest first, with commas between; by default other"
            " numbers of policy. The last resort is full."
        ),
    )
    require_certificate: bool = Field(
        default=False,
        description=(
            "Answer only under policies that kvlinker certify has certified with this model, and"
            " full."
        ),
    )
    quality_per_tenant: bool = Field(
        default=False, description="Steer the default policy of each tenant apart."
    )

    host: str = Field(
        default="127.0.0.1",
        description="Address to bind; without API keys only loopback is allowed.",
    )
    port: int = Field(default=8000, ge=0, le=65535, description="Port to bind; 0 takes a free one.")
    allowed_hosts: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_commas)] = Field(
        default=(),
        description=(
            "Host names that requests may use beside localhost, with commas between; * for any."
            " Without them, only servers without API keys check."
        ),
    )
    cors_origins: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_commas)] = Field(
        default=(),
        description=(
            "Origins whose pages may call the server from browsers, such as https://app.example,"
            " with commas between; * for any. None by default."
        ),
    )
    request_timeout: float = Field(
        default=30,
        gt=0,
        description="Seconds in which a request's headers must come, and its body begin to flow.",
    )
    drain_timeout: float = Field(
        default=25,
        ge=0,
        description="Seconds in which requests may finish when the server is told to stop.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info",
        description=(
            "What is logged: info has a line per request, warning and error only what is wrong."
        ),
    )
    log_format: Literal["text", "json"] = Field(
        default="text", description="How the log is written: text, or json, an object per line."
    )
    api_keys: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_commas)] = Field(
        default=(),
        repr=False,
        description="Accepted keys, with commas between; each is a tenant of its own.",
    )
    admin_keys: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_commas)] = Field(
        default=(),
        repr=False,
        description="Accepted keys that may also write shared context caches.",
    )
    tenant_quotas: Annotated[dict[str, TenantQuota], NoDecode, BeforeValidator(_parse_json)] = (
        Field(
            default={},
            repr=False,
            description='Other quotas, by API key or "shared": {"KEY": {"bytes": …, "caches": …}}.',
        )
    )

    @property
    def accepted_keys(self) -> tuple[str, ...]:
        """All API keys, those of admins included."""
        return tuple(dict.fromkeys((*self.api_keys, *self.admin_keys)))

    @property
    def quotas(self) -> Quotas:
        default = Quota(
            self.tenant_quota_bytes, self.tenant_quota_caches, self.tenant_quota_pinned_bytes
        )
        quotas = Quotas(default)
        own = {}
        for name, quota in self.tenant_quotas.items():
            tenant = name if name == SHARED_TENANT else tenant_of_key(name)
            own[tenant] = replace(quotas.of(tenant), **quota.model_dump(exclude_none=True))
        return replace(quotas, own=own)

    @property
    def served_name(self) -> str:
        """The model's name in the API: a folder's name, or the hub id, unless another is set."""
        return self.served_model_name or (
            Path(self.model).name if Path(self.model).is_dir() else self.model
        )

    @property
    def searchable(self) -> bool:
        """True if chunks' texts are indexed to be searched."""
        return self.search == "on" or (self.search == "auto" and self.encryption_key is None)

    @field_validator("weights")
    @classmethod
    def _weights_fit(cls, value: WeightFormat, info: ValidationInfo) -> WeightFormat:
        if value != "auto" and info.data.get("engine") == "vllm":
            raise ValueError(
                "vLLM quantises by options of its own: leave it out, and give vllm_options"
                ' {"quantization": "fp8"}, or another of vLLM\'s methods'
            )
        dtype = info.data.get("dtype")
        if value == "bf16" and dtype not in ("auto", "bfloat16"):
            raise ValueError(f"dtype is {dtype}: leave one of them out")
        return value

    @field_validator(*_NEEDED)
    @classmethod
    def _has_what_it_needs(cls, value: Any, info: ValidationInfo) -> Any:
        needed = _NEEDED[str(info.field_name)]
        if value and needed in info.data and not info.data[needed]:
            raise ValueError(f"it has no effect without {needed}: set that, too, or leave this out")
        return value

    @field_validator("state_dir")
    @classmethod
    def _expand(cls, value: Path) -> Path:
        return value.expanduser()

    @field_validator("cors_origins")
    @classmethod
    def _are_origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for origin in value:
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s@?#]+", origin):
                raise ValueError(
                    f"{origin!r} is no origin: write scheme, host and port, such as"
                    " https://app.example"
                )
        return value

    @field_validator("tenant_quotas")
    @classmethod
    def _known_tenants(
        cls, value: dict[str, TenantQuota], info: ValidationInfo
    ) -> dict[str, TenantQuota]:
        known = {SHARED_TENANT, *info.data.get("api_keys", ()), *info.data.get("admin_keys", ())}
        if strangers := len(value.keys() - known):
            raise ValueError(f"{strangers} of its names are neither API keys nor {SHARED_TENANT!r}")
        return value

    @field_validator("disk_codec", "redis_codec", "object_codec")
    @classmethod
    def _known_codec(cls, value: str) -> str:
        from kvlinker.store.format.codecs import known_codecs  # which needs torch

        known = known_codecs()
        if value not in known:
            raise ValueError(f"it must be one of {', '.join(known)}")
        return value

    @field_validator("policy", "implicit_policy")
    @classmethod
    def _known_policy(cls, value: str | None, info: ValidationInfo) -> str | None:
        try:
            return None if value is None else parse_policy(value).name
        except PolicyError as error:
            raise PolicyError(error.message, param=info.field_name) from error

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        file = os.environ.get(CONFIG_FILE_VARIABLE)
        if file and not Path(file).is_file():
            raise InvalidRequestError(f"{CONFIG_FILE_VARIABLE} names no file: {file}")
        toml = TomlConfigSettingsSource(settings_cls, file)
        return init_settings, env_settings, toml
