"""Defines the settings of the model: which one, and how its prompts and answers are made."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator
from pydantic_settings import BaseSettings

from kvlinker.base.types.limits import MOST_CALLS
from kvlinker.settings.values import FromJson

BUNDLED_MODEL = Path(__file__).parents[1] / "models" / "reader"

WeightFormat = Literal["auto", "bf16", "int8", "int4"]
"""How the weights of a model's linear layers are held: ``auto`` in the model's dtype, ``int8`` and
``int4`` in 8 and 4 bits."""


class ModelSettings(BaseSettings):
    """The model, its engine, and the defaults of its prompts and answers."""

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
