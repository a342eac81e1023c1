"""Reads models and tokenizers from files, and computes the fingerprint of their content."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import httpx
import torch
import transformers
from blake3 import blake3
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import cached_file
from transformers.utils import logging as transformers_logging

from kvlinker.config import Settings, WeightFormat
from kvlinker.errors import ModelLoadError
from kvlinker.store.format.durability import replace_file

logger = logging.getLogger(__name__)

RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""The sampling parameters that a model's ``generation_config.json`` may recommend."""

_WANTED = "Give the path of a folder with a transformers model, or the id of one on the Hugging Face hub."

FINGERPRINTS = "fingerprints.json"
"""The file in the state directory that remembers the fingerprints of models' files."""


def read_model(settings: Settings) -> tuple[Any, Any]:
    """Read the model, in the dtype and on the device that the settings ask for, and its tokenizer.

    Raises ModelLoadError when either cannot be loaded.
    """
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, device, settings.weights)
    tokenizer = read_tokenizer(settings)
    model = _read(AutoModelForCausalLM, settings, dtype=dtype)
    return model.to(device).eval(), tokenizer


def read_tokenizer(settings: Settings) -> Any:
    """Read the model's tokenizer. Raises ModelLoadError when it cannot be loaded."""
    tokenizer = _read(AutoTokenizer, settings)
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ModelLoadError(f"The tokenizer of {settings.model!r} has no tokenizer.json; kvlinker needs one.")
    return tokenizer


def read_config(settings: Settings) -> Any:
    """Read the model's configuration. Raises ModelLoadError when it cannot be loaded."""
    return _read(AutoConfig, settings)


def read_generation_config(settings: Settings) -> Any:
    """Read the model's ``generation_config.json``; None where it has none."""
    try:
        return GenerationConfig.from_pretrained(settings.model)
    except OSError:
        return None


def sampling_defaults(generation_config: Any) -> dict[str, float]:
    """Return the sampling parameters that the model's authors recommend, by name. ``do_sample`` is none of them:
    requests choose greedy decoding by temperature 0."""
    found = {name: getattr(generation_config, name, None) for name in RECOMMENDED}
    return {name: value for name, value in found.items() if value is not None}


def _read(kind: Any, settings: Settings, **options: Any) -> Any:
    _check_place(settings.model)
    transformers_logging.disable_progress_bar()
    try:
        return kind.from_pretrained(settings.model, trust_remote_code=settings.trust_remote_code, **options)
    except Exception as error:  # transformers raises whatever it meets
        if _is_offline(error):
            raise ModelLoadError(
                f"{settings.model!r} is not on this machine, and the Hugging Face hub cannot be reached. Where it can "
                f"be, run `hf download {settings.model} --local-dir FOLDER`; copy the folder, and give its path."
            ) from error
        raise ModelLoadError(f"Cannot load {settings.model!r}: {error} {_WANTED}") from error


def _check_place(model: str) -> None:
    """Raise ModelLoadError for a path where there is no model of transformers, and for GGUF."""
    path = Path(model)
    if (path / "config.json").is_file():
        return
    if "gguf" in path.name.lower() or any(path.glob("*.gguf")):
        raise ModelLoadError(
            f"{model} is GGUF, the format of llama.cpp, which kvlinker does not read. Give the model that it was made "
            "of, as a folder with config.json and *.safetensors, or by its hub id; weights=int4 holds it in 4 bits."
        )
    if path.is_file():
        raise ModelLoadError(f"{model} is a file. {_WANTED}")
    if path.is_dir():
        raise ModelLoadError(f"{model} has no config.json. {_WANTED}")
    if os.path.isabs(model) or model.startswith((".", "~")) or model.count("/") > 1:
        raise ModelLoadError(f"No model at {model}: there is no such folder.")


def _is_offline(error: BaseException | None) -> bool:
    """Tell if an error comes from a hub that cannot be reached."""
    causes = (LocalEntryNotFoundError, OfflineModeIsEnabled, httpx.TransportError)
    return error is not None and (isinstance(error, causes) or _is_offline(error.__cause__ or error.__context__))


def choose_device(name: str) -> torch.device:
    """Return the named device; ``auto`` is CUDA where present, else the CPU. Raises ModelLoadError for others."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ModelLoadError(f"Unknown device {name!r}: use auto, cpu, cuda or cuda:<index>.") from error


def choose_dtype(name: str, device: torch.device, weights: WeightFormat = "auto") -> torch.dtype:
    """Return the named dtype; ``auto`` is bfloat16 where the hardware multiplies it or weights are to be in it, else
    float32."""
    if weights == "bf16":
        return torch.bfloat16
    if name != "auto":
        chosen: torch.dtype = getattr(torch, name)
        return chosen
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    multiplies_bf16 = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if multiplies_bf16 else torch.float32


def fingerprint(model: Any) -> str:
    """Compute the model's fingerprint: BLAKE3 (hex) over its config, rotary parameters included, and every weight in
    the dtype that it runs in."""
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


def fingerprint_with(name: str, weights: WeightFormat) -> str:
    """Return the fingerprint of the model ``name`` with weights in a format, which changes the KV that it computes."""
    return name if weights in ("auto", "bf16") else blake3(f"{name} weights in {weights}".encode()).hexdigest()


def known_fingerprint(settings: Settings, dtype: torch.dtype) -> str:
    """Return the fingerprint of ``settings.model`` in this dtype, without a model in memory.

    It is remembered in the state directory, where it was computed for the same files before; else all weights are read.
    Raises ModelLoadError.
    """
    place = settings.state_dir / FINGERPRINTS
    name = _files_name(settings, dtype)
    try:
        known = json.loads(place.read_text())
        if isinstance(known[name], str):
            return str(known[name])
    except (OSError, ValueError, KeyError, TypeError):
        known = {}
    dtype_name = str(dtype).removeprefix("torch.")
    on_cpu = settings.model_copy(update={"device": "cpu", "dtype": dtype_name, "weights": "auto", "threads": None})
    model, _ = read_model(on_cpu)
    known = (known if isinstance(known, dict) else {}) | {name: fingerprint(model)}
    try:
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(place, json.dumps(known).encode())
    except OSError as error:
        logger.warning("The model's fingerprint is computed again next time: %s", error)
    return str(known[name])


def _files_name(settings: Settings, dtype: torch.dtype) -> str:
    """Return a name of everything that the fingerprint depends on; of the weights' files only size and time are
    read."""
    folder = Path(settings.model)
    if not folder.is_dir():
        folder = Path(cached_file(settings.model, "config.json")).parent
    files = sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in folder.iterdir())
    parts = [str(folder.resolve()), files, str(dtype), transformers.__version__]
    return blake3(json.dumps(parts).encode()).hexdigest()
