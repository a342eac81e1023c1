"""Settings of a kvlinker process: arguments first, then ``KVLINKER_*`` variables, then a TOML file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

import psutil
from pydantic import BeforeValidator, ByteSize, Field, field_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from kvlinker.chunks import GenerationContext
from kvlinker.linking import parse_policy

BUNDLED_MODEL = Path(__file__).parent / "models" / "reader"
CONFIG_FILE_VARIABLE = "KVLINKER_CONFIG"


def _split_commas(value: object) -> object:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


class Settings(BaseSettings):
    """Everything that can be configured. Sizes take units, such as ``4GiB``."""

    model_config = SettingsConfigDict(env_prefix="KVLINKER_", extra="forbid", frozen=True)

    model: str = Field(default=str(BUNDLED_MODEL), description="Local path or Hugging Face hub id.")
    served_model_name: str | None = Field(default=None, description="Name in the API; the model's own by default.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = Field(default="auto", description="cpu, cuda, cuda:1, …; auto takes CUDA when present.")
    trust_remote_code: bool = False
    chat_template: str | None = Field(default=None, description="Jinja text in place of the tokenizer's own.")
    system_prompt: str | None = Field(default=None, description="Stands before conversations that bring none.")

    policy: str = Field(default="legolink-16", description="Linking policy of requests that name none.")
    generation_context: GenerationContext = GenerationContext.PREFIX

    max_model_len: int | None = Field(default=None, ge=8, description="Tokens; the model's own limit by default.")
    kv_slots: int | None = Field(default=None, ge=16, description="Tokens that the KV pool holds.")
    max_step_tokens: int = Field(default=2048, ge=1, description="Most tokens computed in one step.")
    max_running: int = Field(default=64, ge=1, description="Most requests computed in one step.")
    max_waiting: int = Field(default=256, ge=1, description="Longer queues answer 429.")
    threads: int | None = Field(default=None, ge=1, description="CPU threads for the model; all by default.")

    state_dir: Path = Path("~/.local/share/kvlinker")
    host_memory: ByteSize = Field(
        default_factory=lambda: ByteSize(psutil.virtual_memory().total // 4), description="Host tier budget."
    )
    disk_space: ByteSize = Field(default=ByteSize(20 * 2**30), description="Disk tier budget.")

    host: str | None = Field(default=None, description="Address to bind; without API keys only loopback is allowed.")
    port: int = Field(default=8000, ge=0, le=65535)
    api_keys: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_commas)] = Field(
        default=(), description="Accepted keys; each is a tenant of its own."
    )

    @field_validator("state_dir")
    @classmethod
    def _expand(cls, value: Path) -> Path:
        return value.expanduser()

    @field_validator("policy")
    @classmethod
    def _known_policy(cls, value: str) -> str:
        return parse_policy(value).name

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        toml = TomlConfigSettingsSource(settings_cls, os.environ.get(CONFIG_FILE_VARIABLE))
        return init_settings, env_settings, toml


def load_settings(**options: Any) -> Settings:
    """Settings from the given options (None means not given), the environment and the TOML file.

    Raises pydantic's ValidationError naming each bad option.
    """
    return Settings(**{name: value for name, value in options.items() if value is not None})
