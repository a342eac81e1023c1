"""Reads models and tokenizers from files, and computes the fingerprint of their content."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import torch
from blake3 import blake3
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
)
from transformers.utils import cached_file
from transformers.utils import logging as transformers_logging

from kvlinker.base.errors import ModelLoadError
from kvlinker.base.garbage import pause_collector
from kvlinker.base.loading import Report, unreported
from kvlinker.base.threads import set_threads
from kvlinker.engines.contract.file_hashes import file_hashes
from kvlinker.engines.contract.gguf_unpacking import ORIGIN, with_folder
from kvlinker.engines.contract.lean_reading import parameters_without_memory, without_copies
from kvlinker.engines.contract.model_place import (
    CONFIG,
    WANTED,
    check_model,
    unreachable,
    weight_files,
)
from kvlinker.engines.contract.removed_models import refuse_removed
from kvlinker.settings import Settings, WeightFormat

RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""The sampling parameters that a model's ``generation_config.json`` may recommend."""

VOLATILE = ("_name_or_path", "transformers_version", "_attn_implementation_autoset")
"""The entries of a model's configuration that change nothing that it computes."""


def read_model(
    settings: Settings, *, own_bf16: bool = False, weights: Mapping[str, Tensor] | None = None
) -> tuple[Any, Any]:
    """Read the model, in the dtype and on the device that the settings ask for, and its tokenizer.

    With ``weights``, all of them by name, no files are read for them, and they stay where they are.
    With ``own_bf16``, the engine has code of its own for weights in bf16 on CPUs that do not
    multiply it, and for experts in transformers' common form; others are PyTorch's to multiply,
    which is slow there. Raises ModelLoadError when either cannot be loaded,
    UnsupportedModelError when kvlinker no longer links the model's family.
    """
    set_threads(settings.threads)
    settings = with_folder(settings)
    device = choose_device(settings.device)
    config = _read(AutoConfig, settings)
    refuse_removed(config)
    own_bf16 = own_bf16 and (not expert_counts(config) or has_common_experts(config))
    dtype = choose_dtype(settings.dtype, device, settings.weights, own_bf16=own_bf16)
    tokenizer = read_tokenizer(settings)
    kind = _model_class(config)
    if weights is None:
        return _read(kind, settings, dtype=dtype).to(device).eval(), tokenizer
    with parameters_without_memory():
        model = kind.from_config(config, dtype=dtype)
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    if lacking := [name for name, weight in model.named_parameters() if weight.is_meta]:
        raise ModelLoadError(
            f"{settings.model!r} has no weights for {', '.join(lacking[:3])}: delete the folder,"
            " and the file is unpacked again."
        )
    model.generation_config = _read(GenerationConfig, settings)
    return model.eval(), tokenizer


def _model_class(config: Any) -> Any:
    """Return what reads a model of this configuration: one of text, or of images and text where
    transformers has no other, as of Kimi K2.5."""
    only_with_images = (
        type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
    )
    return AutoModelForImageTextToText if only_with_images else AutoModelForCausalLM


@pause_collector()
def read_tokenizer(settings: Settings, **options: Any) -> Any:
    """Read the tokenizer of ``settings.model``; ``options`` are transformers', such as
    ``revision``. Raises ModelLoadError when it cannot be loaded."""
    with without_copies():
        tokenizer = _read(AutoTokenizer, settings, **options)
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ModelLoadError(
            f"The tokenizer of {settings.model!r} has no tokenizer.json; kvlinker needs one."
        )
    return tokenizer


def sampling_defaults(generation_config: Any) -> dict[str, float]:
    """Return the sampling parameters that the model's authors recommend, by name. ``do_sample`` is
    none of them: requests choose greedy decoding by temperature 0."""
    found = {name: getattr(generation_config, name, None) for name in RECOMMENDED}
    return {name: value for name, value in found.items() if value is not None}


def _read(kind: Any, settings: Settings, **options: Any) -> Any:
    check_model(settings)
    transformers_logging.disable_progress_bar()
    try:
        return kind.from_pretrained(
            settings.model, trust_remote_code=settings.trust_remote_code, **options
        )
    except Exception as error:  # transformers raises whatever it meets
        if _is_offline(error):
            raise unreachable(settings.model) from error
        raise ModelLoadError(f"Cannot load {settings.model!r}: {error} {WANTED}") from error


def _is_offline(error: BaseException | None) -> bool:
    """Return whether an error comes from a hub that cannot be reached."""
    causes = (LocalEntryNotFoundError, OfflineModeIsEnabled, httpx.TransportError)
    return error is not None and (
        isinstance(error, causes) or _is_offline(error.__cause__ or error.__context__)
    )


def choose_device(name: str) -> torch.device:
    """Return the named device; ``auto`` is CUDA where present, else the CPU. Raises ModelLoadError
    for others, and for a GPU that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelLoadError(
            f"Unknown device {name!r}: use auto, cpu, cuda or cuda:<index>."
        ) from error
    if device.type == "cuda" and (device.index or 0) >= (found := torch.cuda.device_count()):
        raise ModelLoadError(
            f"There is no device {name!r}: PyTorch {torch.__version__} finds {found} GPUs here. Use"
            " another, or auto; builds of PyTorch for CPUs find none."
        )
    return device


def expert_counts(config: Any) -> set[int]:
    """Return the numbers of experts that a model's configuration names; empty for a model without
    experts."""
    values = config.get_text_config().to_dict().items()
    return {
        value
        for name, value in values
        if name.startswith(("n_", "num_")) and "expert" in name and isinstance(value, int)
    }


def has_common_experts(config: Any) -> bool:
    """Return whether transformers' model of this configuration has its experts in the form that is
    common to nearly all families."""
    mapping = _model_class(config)._model_mapping
    return type(config) in mapping and mapping[type(config)]._can_set_experts_implementation()


def choose_dtype(
    name: str, device: torch.device, weights: WeightFormat = "auto", *, own_bf16: bool = False
) -> torch.dtype:
    """Return the named dtype; ``auto`` is bfloat16 where weights are to be in it, and where the
    hardware multiplies it or, with ``own_bf16``, the engine's own code does; else float32."""
    if weights == "bf16":
        return torch.bfloat16
    if name != "auto":
        chosen: torch.dtype = getattr(torch, name)
        return chosen
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    multiplies_bf16 = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if multiplies_bf16 or own_bf16 else torch.float32


def fingerprint(model: Any) -> str:
    """Compute the fingerprint of a model that comes from no files: BLAKE3 (hex) over its config,
    rotary parameters included, and every weight in the dtype that it runs in."""
    digest = blake3(max_threads=blake3.AUTO)
    config = model.config.to_dict()
    for name in VOLATILE:
        config.pop(name, None)
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    for name, weight in sorted(model.state_dict().items()):
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        content = weight.detach().contiguous().cpu().flatten().view(torch.uint8).numpy()
        digest.update(content)
    return digest.hexdigest()


def fingerprint_with(name: str, change: str) -> str:
    """Return the fingerprint of the model ``name`` with a ``change`` of the KV that it computes."""
    return blake3(f"{name} {change}".encode()).hexdigest()


def fingerprint_of_files(
    folder: Path, dtype: torch.dtype, *, state_dir: Path, report: Report = unreported
) -> str | None:
    """Compute the fingerprint of the model in ``folder`` as it runs in this dtype: BLAKE3 (hex)
    over its config.json and the content of its weight files, or of the GGUF files that were
    unpacked there, which no memory holds at once. Returns None if it has no such files.

    A file's hash is remembered in ``state_dir`` until the file changes or is replaced, so that it
    is read once; ``report`` takes the progress.
    """
    weights, origin = weight_files(folder), folder / ORIGIN
    if not weights or not (folder / CONFIG).is_file():
        return None
    config = json.loads((folder / CONFIG).read_text())
    for name in VOLATILE:
        config.pop(name, None)
    hashes = (
        json.loads(origin.read_text())
        if origin.is_file()
        else list(
            zip(
                (path.name for path in weights),
                file_hashes(weights, state_dir, report),
                strict=True,
            )
        )
    )
    return blake3(json.dumps([config, str(dtype), hashes], sort_keys=True).encode()).hexdigest()


def model_folder(name: str, *, revision: str | None = None, cache_dir: str | None = None) -> Path:
    """Return the folder with the files of a model, which may be a hub's that have been downloaded.
    Raises ModelLoadError."""
    if Path(name).is_dir():
        return Path(name)
    try:
        return Path(
            cached_file(name, CONFIG, revision=revision, cache_dir=cache_dir, local_files_only=True)
        ).parent
    except OSError as error:
        raise ModelLoadError(f"The files of {name!r} are not found: {error}") from error
