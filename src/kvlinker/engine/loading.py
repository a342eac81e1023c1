"""Models from a path or hub id to something that the engine can run."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from kvlinker.config import Settings
from kvlinker.engine.anatomy import LayerShape, context_window, trace_layers
from kvlinker.engine.interception import ATTENTION_NAME
from kvlinker.engine.selftest import require_exact
from kvlinker.errors import ModelLoadError


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model ready for the runner: its attention is kvlinker's."""

    model: Any
    tokenizer: Any
    layers: tuple[LayerShape, ...]
    fingerprint: str
    dtype: torch.dtype
    device: torch.device
    context_window: int
    eos_token_ids: frozenset[int]

    @property
    def vocabulary(self) -> int:
        """Token ids that the model knows: 0 to this, exclusive."""
        return int(self.model.get_input_embeddings().num_embeddings)

    @property
    def kv_bytes_per_token(self) -> int:
        """What a token's KV takes, over all layers."""
        return sum(layer.values_per_token for layer in self.layers) * self.dtype.itemsize


def load_model(settings: Settings) -> LoadedModel:
    """Load ``settings.model`` with its tokenizer, ready for the runner.

    Raises ModelLoadError when it cannot be loaded, UnsupportedModelError when its KV cannot be linked exactly.
    """
    return prepare_model(*read_model(settings))


def read_model(settings: Settings) -> tuple[Any, Any]:
    """The model, in the dtype and on the device that the settings ask for, and its tokenizer.

    Raises ModelLoadError when either cannot be loaded.
    """
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, device)
    tokenizer = read_tokenizer(settings)
    model = _read(AutoModelForCausalLM, settings, dtype=dtype)
    return model.to(device).eval(), tokenizer


def read_tokenizer(settings: Settings) -> Any:
    """The model's tokenizer. Raises ModelLoadError when it cannot be loaded."""
    tokenizer = _read(AutoTokenizer, settings)
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ModelLoadError(f"The tokenizer of {settings.model!r} has no tokenizer.json; kvlinker needs one.")
    return tokenizer


def read_config(settings: Settings) -> Any:
    """The model's configuration. Raises ModelLoadError when it cannot be loaded."""
    return _read(AutoConfig, settings)


def _read(kind: Any, settings: Settings, **options: Any) -> Any:
    if os.path.isabs(settings.model) and not Path(settings.model).is_dir():
        raise ModelLoadError(f"No model at {settings.model}: there is no such folder.")
    transformers_logging.disable_progress_bar()
    try:
        return kind.from_pretrained(settings.model, trust_remote_code=settings.trust_remote_code, **options)
    except Exception as error:  # transformers raises whatever it meets
        raise ModelLoadError(
            f"Cannot load {settings.model!r}: {error} Give the path of a folder with a transformers model, or the id "
            "of one on the Hugging Face hub."
        ) from error


def prepare_model(model: Any, tokenizer: Any) -> LoadedModel:
    """Check that a transformers model can be linked exactly, and give it kvlinker's attention.

    Raises UnsupportedModelError when its KV cannot be linked.
    """
    transformers_logging.set_verbosity_error()
    layers = trace_layers(model)
    require_exact(model)
    model.set_attn_implementation(ATTENTION_NAME)
    parameter = next(model.parameters())
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        layers=layers,
        fingerprint=fingerprint(model),
        dtype=parameter.dtype,
        device=parameter.device,
        context_window=context_window(model),
        eos_token_ids=_eos_token_ids(model, tokenizer),
    )


def choose_device(name: str) -> torch.device:
    """The named device; ``auto`` is CUDA where present, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ModelLoadError(f"Unknown device {name!r}: use auto, cpu, cuda or cuda:<index>.") from error


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The named dtype; ``auto`` is bfloat16 where the hardware multiplies it, else float32."""
    if name != "auto":
        chosen: torch.dtype = getattr(torch, name)
        return chosen
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    multiplies_bf16 = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if multiplies_bf16 else torch.float32


def fingerprint(model: Any) -> str:
    """BLAKE3 (hex) over the config, rotary parameters included, and every weight in the dtype it runs in."""
    digest = blake3(max_threads=blake3.AUTO)
    config = model.config.to_dict()
    for volatile in ("_name_or_path", "transformers_version", "_attn_implementation_autoset"):
        config.pop(volatile, None)
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    for name, weight in sorted(model.state_dict().items()):
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        content = weight.detach().contiguous().cpu().flatten().view(torch.uint8).numpy()
        digest.update(content)
    return digest.hexdigest()


def _eos_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    configured = model.generation_config.eos_token_id if model.generation_config is not None else None
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(i for i in (*ids, getattr(tokenizer, "eos_token_id", None)) if i is not None)
