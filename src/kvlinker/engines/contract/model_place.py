"""Checks that there is a model at the place in the settings. It loads no torch, so that commands
fail at once."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from kvlinker.base.errors import ModelLoadError
from kvlinker.engines.contract.gguf_files import gguf_files
from kvlinker.settings import Settings

WANTED = (
    "Give the path of a folder with a transformers model, of a GGUF file, or the id of a model on"
    " the Hugging Face hub."
)

WITHOUT = "Without the setting, the model in the box is served."

CONFIG = "config.json"

WEIGHTS = ("model*.safetensors", "*.safetensors", "pytorch_model*.bin", "*.bin", "*.pt")
"""The names of weight files, in the order in which they are looked for: a folder may hold the same
weights twice."""

POINTER = b"version https://git-lfs.github.com/"
"""How a file of Git LFS begins that stands in for one that was not downloaded."""

SHARD = re.compile(r"(.+)-(\d+)-of-(\d+)(\.safetensors|\.bin)")
"""The name of one of a model's weight files, where there are several."""

HUB_SECONDS = 3.0
"""The longest wait for the hub to answer, before a model that is not on this machine is given
up."""


def check_model(settings: Settings) -> None:
    """Raise ModelLoadError for a path where there is no model of transformers and no GGUF, or only
    a part of one, and for a hub id whose model is not on this machine while the hub cannot be
    reached."""
    model = settings.model
    if not model.strip():
        raise ModelLoadError(f"The setting model is empty. {WANTED} {WITHOUT}")
    path = Path(model)
    if (path / CONFIG).is_file():
        _check_files(path, settings)
        return
    if gguf_files(model):
        return
    if path.is_file():
        raise ModelLoadError(f"{model} is a file. {WANTED}")
    if path.is_dir():
        raise ModelLoadError(f"{model} has no config.json. {WANTED}")
    if os.path.isabs(model) or model.startswith((".", "~")) or model.count("/") > 1:
        raise ModelLoadError(f"No model at {model}: there is no such folder.")
    options = settings.vllm_options
    _check_hub(model, options.get("download_dir"), options.get("revision"))


def weight_files(folder: Path) -> list[Path]:
    """Return the files in ``folder`` that hold the model's weights, of the first kind of which
    there are some."""
    found = (sorted(folder.glob(pattern)) for pattern in WEIGHTS)
    return next((files for files in found if files), [])


def _check_files(folder: Path, settings: Settings) -> None:
    """Check that the files in ``folder`` were downloaded, and that there is an index of weights
    which lie in several. Raises ModelLoadError."""
    weights = weight_files(folder)
    for file in (*weights, folder / "tokenizer.json"):
        if file.is_file():
            with file.open("rb") as content:
                if content.read(len(POINTER)) == POINTER:
                    raise ModelLoadError(
                        f"{file} is a pointer of Git LFS, not the file itself. Run `git lfs pull`"
                        f" in {folder}."
                    )
    shards = [shard for file in weights if (shard := SHARD.fullmatch(file.name)) is not None]
    if not shards or settings.engine == "vllm":  # which needs no index
        return
    name, _, count, kind = shards[0].groups()
    whole, index = folder / f"{name}{kind}", folder / f"{name}{kind}.index.json"
    if not index.is_file() and not whole.is_file():
        raise ModelLoadError(
            f"{folder} has weights in {count} files, but no {index.name}, which says what is in"
            " which. Copy it from where the model comes from."
        )


def _check_hub(model: str, cache_dir: Any, revision: Any) -> None:
    """Check that the hub answers if its model is not on this machine, since loading would retry for
    a minute. Raises ModelLoadError. Errors that the hub answers are left to the loading."""
    try:
        if not isinstance(
            try_to_load_from_cache(model, CONFIG, cache_dir=cache_dir, revision=revision), str
        ):
            get_hf_file_metadata(hf_hub_url(model, CONFIG, revision=revision), timeout=HUB_SECONDS)
    except (HfHubHTTPError, HFValidationError):
        return
    except (
        Exception
    ) as error:  # connections fail in many ways, by errors of the library beneath the hub's
        raise unreachable(model) from error


def unreachable(model: str) -> ModelLoadError:
    """Return the error of a model that only the hub has, which cannot be reached."""
    return ModelLoadError(
        f"{model!r} is not on this machine, and the Hugging Face hub cannot be reached. Where it"
        f" can be, run `hf download {model} --local-dir FOLDER`; copy the folder, and give its"
        " path."
    )
