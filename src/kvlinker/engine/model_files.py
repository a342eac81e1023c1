"""Models and tokenizers as they lie in files: reading them, and naming what they hold."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from kvlinker.config import Settings
from kvlinker.errors import ModelLoadError


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
