"""Defines everything that can be configured, and reads it from arguments, ``KVLINKER_*`` variables,
and a TOML file."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit

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
from kvlinker.base.types.limits import MOST_CALLS
from kvlinker.base.types.tenants import SHARED_TENANT, Quota, Quotas, tenant_of_key
from kvlinker.linking import parse_policy

VARIABLE_PREFIX = "KVLINKER_"
CONFIG_FILE_VARIABLE = "KVLINKER_CONFIG"

BUNDLED_MODEL = Path(__file__).parents[1] / "models" / "reader"

WeightFormat = Literal["auto", "bf16", "int8", "int4"]
"""How the weights of a model's linear layers are held: ``auto`` in the model's dtype, ``int8`` and
``int4`` in 8 and 4 bits."""

AUTO = "auto"
"""The policy that is chosen by what was measured with the model."""

UNMEASURED = "row+query-5-sensitive"
"""The policy that stands for ``AUTO`` until something was measured."""

Quality = Literal["high", "balanced", "fast"]

CATALOG_FILE = "catalog.sqlite"
"""The catalog's file in the state directory."""

_SQLITE = "sqlite:///"
"""The beginning of URLs of files: the path follows, which begins with a slash if it is absolute."""

_RAW = "raw"
"""The codec that changes nothing. Settings without another codec need neither those nor torch."""

SHARED_TIER_SETTINGS = ("redis_url", "redis_prefix", "object_url", "object_space")

_NEEDED = {
    "audit_tokens": "audit",
    "audit_log": "audit",
    "audit_log_text": "audit_log",
    "quality_target": "audit",
    "quality_policies": "quality_target",
    "quality_per_tenant": "quality_target",
}
"""The setting without which another one has no effect."""

_Value = TypeVar("_Value")


def _split_commas(value: object) -> object:
    return (
        [part.strip() for part in value.split(",") if part.strip()]
        if isinstance(value, str)
        else value
    )


CommaSeparated = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_commas)]
"""Several strings, with commas between in a variable or on the command line."""


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


FromJson = Annotated[_Value, NoDecode, BeforeValidator(_parse_json)]
"""A value that is written as JSON in a variable or on the command line."""


def names_host(url: str, *schemes: str) -> bool:
    """Return whether a URL has one of the schemes and a host, and no port that cannot be."""
    try:
        parts = urlsplit(url)
        return parts.scheme in schemes and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port, or an IPv6 address, that is none
        return False


class TenantQuota(BaseModel):
    """The limits of one tenant; None for the limit that all tenants have by default."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    bytes: ByteSize | None = None
    caches: int | None = Field(default=None, ge=0)
    pinned_bytes: ByteSize | None = None


class Settings(BaseSettings):
    """Everything that can be configured. Sizes take units, such as ``4GiB``.

    A field's validator sees the fields before it.
    """

    model_config = SettingsConfigDict(
        env_prefix=VARIABLE_PREFIX, env_ignore_empty=True, extra="forbid", frozen=True
    )

    # Model and answers

    model: str = Field(
        default=str(BUNDLED_MODEL),
        description=(
            "Folder of a transformers model, GGUF file, or Hugging Face hub id; the shipped model"
            " by default."
        ),
    )
    served_model_name: str | None = Field(
        default=None,
        description="Name in the API, or several with commas; the model's own by default.",
    )
    strict: bool = Field(
        default=False,
        description="Refuse requests with fields, tools or parts that would be left out, with 400.",
    )
    strict_model: bool = Field(
        default=False, description="Refuse requests for a model of another name with 404."
    )
    engine: Literal["embedded", "vllm"] = Field(
        default="embedded", description="What runs the model: embedded, vllm."
    )
    vllm_options: FromJson[dict[str, Any]] = Field(
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
        default="auto",
        description="bfloat16 where the hardware, or native code, multiplies it, else float32.",
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
        default=None, description="The system prompt of conversations without one."
    )
    generation_config: Literal["auto", "off"] = Field(
        default="auto",
        description=(
            "Sampling parameters that requests leave out are the model's own recommendation."
        ),
    )
    embedding_model: str | None = Field(
        default=None,
        description=(
            "Folder of an embedding model (sentence-transformers): texts get vectors, and chunks"
            " are found by meaning, too."
        ),
    )
    max_answer_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Most tokens of an answer; the rest of the context window by default.",
    )
    max_calls: int = Field(
        default=16,
        ge=1,
        le=MOST_CALLS,
        description="Most calls of tools in an answer, which ends with the last of them.",
    )

    # Linking

    policy: str = Field(
        default=AUTO,
        description=(
            "Linking policy of requests that name none; auto: the cheapest that keeps quality, as"
            " a server measures it once with each model."
        ),
    )
    quality: Quality = Field(
        default="high",
        description=(
            "How far policy auto lets answers be from the full computation's: a mean KL of at most"
            " 0.05 (high), 0.1 (balanced) or 0.2 nats per token (fast)."
        ),
    )
    generation_context: GenerationContext = Field(
        default=GenerationContext.PREFIX,
        description="The default context of chunks: alone, bos, prefix.",
    )
    chunk_scores: bool = Field(
        default=True,
        description=(
            "Collect chunks' attention scores and sensitivity; cachecraft, h2o and"
            " query-…-sensitive use them."
        ),
    )
    state_inputs: bool = Field(
        default=True,
        description=(
            "Keep of chunks all that enters layers with a state (hybrid models), for policies that"
            " compute any token again; without, naive, prefix and short legolink work, in less"
            " memory."
        ),
    )
    max_variants: int = Field(
        default=64,
        ge=0,
        description="Variants of chunks that are kept for cachecraft and prefix policies; 0: none.",
    )

    implicit: Literal["structure", "auto", "marked", "off"] = Field(
        default="marked",
        description=(
            "Texts that become chunks without an id: marked (documents, and parts with"
            " cache_control), auto (also long ones that are repeated, and known ones inside"
            " others), structure (definitions of tools, messages and paragraphs), off."
        ),
    )
    implicit_ahead: Literal["on", "off"] = Field(
        default="on",
        description=(
            "With implicit auto or structure: compute new passages while nothing else is to be"
            " done."
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
    keep_answers: Literal["off", "answer"] = Field(
        default="off",
        description="Answers that become chunks with the KV that they were generated with.",
    )
    tool_wait: float = Field(
        default=60.0,
        ge=0,
        le=3600,
        description="Most seconds that a conversation is kept before others while its tool is out.",
    )
    implicit_caches: int = Field(
        default=1000,
        ge=0,
        description="Most chunks without an id that a tenant keeps; those used last stay.",
    )

    # Engine

    max_model_len: int | None = Field(
        default=None, ge=8, description="Tokens; the model's own limit by default."
    )
    kv_slots: int | None = Field(default=None, ge=16, description="Tokens that the KV pool holds.")
    prefix_cache: Literal["on", "off"] = Field(
        default="on", description="Reuse what requests computed in later ones that begin alike."
    )
    max_step_tokens: int | None = Field(
        default=None,
        ge=1,
        description=(
            "Most tokens computed in one step; by default 512 on CPUs, 2048 on GPUs and in vLLM."
        ),
    )
    max_running: int = Field(default=64, ge=1, description="Most requests computed in one step.")
    max_waiting: int = Field(default=256, ge=1, description="Longer queues answer 429.")
    slo_tpot: float | None = Field(
        default=None,
        gt=0,
        description=(
            "Most milliseconds per token of running answers: prompts are computed meanwhile in"
            " pieces that fit; by default 2.25 times what decoding alone takes, and longer if"
            " several answers with short prompts wait."
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
        default=None,
        ge=1,
        le=4096,
        description="CPU threads for the model; all that there are by default.",
    )

    native: Literal["auto", "build", "off"] = Field(
        default="auto",
        description=(
            "Native code for attention, norms and products with weights in bfloat16, in vLLM for"
            " placing chunks, on CPUs with AVX-512, AVX2 or NEON: that of kvlinker's wheel, or"
            " compiled where there is none (auto); always compiled here (build); none (off)."
        ),
    )

    # Store

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

    # Fleet

    role: Literal["both", "build", "serve"] = Field(
        default="both",
        description=(
            "build: compute chunks for other servers, and get no answers to give from a router;"
            " serve: compute none for others."
        ),
    )
    builders: CommaSeparated = Field(
        default=(),
        description=(
            "Addresses of builders, or of a router before them, that are asked for missing chunks,"
            " with commas between: http://10.0.0.7:8000."
        ),
    )
    build_tokens: int = Field(
        default=256, ge=1, description="The fewest tokens of a chunk that builders are asked for."
    )

    # Audit

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
    quality_policies: CommaSeparated = Field(
        default=(),
        description=(
            "Policies that it may become, the cheapest first, with commas between; by default other"
            " numbers of policy. The last resort is full."
        ),
    )
    require_certificate: bool = Field(
        default=False,
        description=(
            "Answer only under policies that kvlinker-lab certify has certified with this model,"
            " and full."
        ),
    )
    quality_per_tenant: bool = Field(
        default=False, description="Steer the default policy of each tenant apart."
    )

    # Server

    host: str = Field(
        default="127.0.0.1",
        description="Address to bind; without API keys only loopback is allowed.",
    )
    port: int = Field(default=8000, ge=0, le=65535, description="Port to bind; 0 takes a free one.")
    allowed_hosts: CommaSeparated = Field(
        default=(),
        description=(
            "Host names that requests may use besides localhost, comma-separated; * for any."
            " Without them, only servers without API keys check."
        ),
    )
    cors_origins: CommaSeparated = Field(
        default=(),
        description=(
            "Origins whose pages may call the server from browsers, such as https://app.example,"
            " with commas between; * for any. None by default."
        ),
    )
    request_timeout: float = Field(
        default=30,
        gt=0,
        description="Seconds in which a request's headers must arrive, and its body begin.",
    )
    drain_timeout: float = Field(
        default=25,
        ge=0,
        description="Seconds in which requests may finish when the server is asked to stop.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info",
        description=(
            "The level of the log: info has a line per request, warning and error only problems."
        ),
    )
    log_format: Literal["text", "json"] = Field(
        default="text", description="How the log is written: text, or json, an object per line."
    )
    api_keys: CommaSeparated = Field(
        default=(),
        repr=False,
        description="Accepted keys, comma-separated; each is a separate tenant.",
    )
    admin_keys: CommaSeparated = Field(
        default=(),
        repr=False,
        description="Accepted keys that may also write shared context caches.",
    )
    response_ttl: float = Field(
        default=604_800.0,
        ge=0,
        description=(
            "Seconds that answers of the Responses API are kept from their last use; 0: not at all."
        ),
    )
    tenant_quotas: FromJson[dict[str, TenantQuota]] = Field(
        default={},
        repr=False,
        description='Other quotas, by API key or "shared": {"KEY": {"bytes": …, "caches": …}}.',
    )

    @property
    def served_name(self) -> str:
        """The first of the model's names in the API."""
        return self.served_names[0]

    @property
    def served_names(self) -> tuple[str, ...]:
        """All names of the model in the API: a folder's or GGUF file's name, or the hub id, unless
        others are set."""
        names = [name.strip() for name in (self.served_model_name or "").split(",")]
        path = Path(self.model)
        own = (
            path.name
            if path.is_dir()
            else path.stem
            if path.suffix.lower() == ".gguf"
            else self.model
        )
        return tuple(dict.fromkeys(filter(None, names))) or (own,)

    @property
    def usual_policy(self) -> str:
        """The policy that is set, or that stands for ``AUTO`` until something was measured."""
        return UNMEASURED if self.policy == AUTO else self.policy

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
        try:
            if file and not Path(file).is_file():
                raise InvalidRequestError(f"{CONFIG_FILE_VARIABLE} names no file: {file}")
            toml = TomlConfigSettingsSource(settings_cls, file)
        except OSError as error:
            raise InvalidRequestError(
                f"{CONFIG_FILE_VARIABLE} names a file that cannot be read: {error}"
            ) from error
        return init_settings, env_settings, toml

    @field_validator("served_model_name")
    @classmethod
    def _names_something(cls, value: str | None) -> str | None:
        if value and not value.replace(",", " ").strip():
            raise ValueError(f"{value!r} has no name: write one, or several with commas")
        return value

    @field_validator("weights")
    @classmethod
    def _weights_fit(cls, value: WeightFormat, info: ValidationInfo) -> WeightFormat:
        if value != "auto" and info.data.get("engine") == "vllm":
            raise ValueError(
                "vLLM has its own options to quantise: leave it out, and give vllm_options"
                ' {"quantization": "fp8"}, or another of vLLM\'s methods'
            )
        dtype = info.data.get("dtype")
        if value == "bf16" and dtype not in ("auto", "bfloat16"):
            raise ValueError(f"dtype is {dtype}: leave one of them out")
        return value

    @field_validator("policy", "implicit_policy")
    @classmethod
    def _known_policy(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value == AUTO and info.field_name == "policy":
            return value
        try:
            return None if value is None else parse_policy(value).name
        except PolicyError as error:
            raise PolicyError(error.message, param=info.field_name) from error

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

    @field_validator("builders")
    @classmethod
    def _are_asked(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if value and info.data.get("engine") == "vllm":
            raise ValueError("the vllm engine asks no builders for chunks: leave it out")
        for url in value:
            if not names_host(url, "http", "https"):
                raise ValueError(f"{url!r} is no address: write http://HOST:PORT")
        return tuple(url.rstrip("/") for url in value)

    @field_validator(*_NEEDED)
    @classmethod
    def _has_what_it_needs(cls, value: Any, info: ValidationInfo) -> Any:
        needed = _NEEDED[str(info.field_name)]
        if value and needed in info.data and not info.data[needed]:
            raise ValueError(f"it has no effect without {needed}: set that, too, or leave this out")
        return value

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
