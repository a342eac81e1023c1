"""Lists the models on this machine: those of the hub's cache, of Ollama and LM Studio, in the box,
and in folders. It loads no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from kvlinker.base.errors import ModelLoadError
from kvlinker.engines.contract.gguf_files import known_ggufs
from kvlinker.engines.contract.model_place import CONFIG
from kvlinker.settings.settings import BUNDLED_MODEL

SAFE_WEIGHTS, OTHER_WEIGHTS = "*.safetensors", ("*.bin", "*.pt", "*.pth")
"""The files of weights; of a model that has both kinds, the safe ones are read."""


class Model(NamedTuple):
    """Describes a model on this machine."""

    name: str
    """The name in commands: the hub id, or the path."""

    nbytes: int
    weights: str
    """How its files hold the weights."""

    window: int | None
    """The tokens that its configuration allows."""


def models_here(folders: Sequence[Path]) -> Iterator[Model]:
    """Yield the models of the hub's cache, the model in the box, those in ``folders`` and in
    folders directly below, and those in GGUF."""
    within = [
        place
        for folder in folders
        for place in (folder, *sorted(folder.iterdir()))
        if place.is_dir()
    ]
    yield from _in_cache()
    yield from _in_folders([BUNDLED_MODEL, *folders])
    yield from _of_llama_cpp(within)


def _in_cache() -> Iterator[Model]:
    """Yield the models of the hub's cache, by name."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    with suppress(CacheNotFound):
        repositories = [each for each in scan_cache_dir().repos if each.repo_type == "model"]
        for repository in sorted(repositories, key=lambda each: each.repo_id):
            latest = max(repository.revisions, key=lambda each: each.last_modified, default=None)
            if latest and (found := _described(repository.repo_id, latest.snapshot_path)):
                yield found


def _in_folders(folders: Sequence[Path]) -> Iterator[Model]:
    """Yield the models in folders, and in those directly below, by their paths."""
    for folder in folders:
        for place in (folder, *sorted(folder.iterdir())):
            if found := _described(str(place), place):
                yield found


def _of_llama_cpp(folders: Sequence[Path]) -> Iterator[Model]:
    """Yield the models in GGUF: in folders, of Ollama, of LM Studio, and in the hub's cache."""
    from huggingface_hub import constants

    from kvlinker.engines.contract.gguf_reading import gguf_facts

    cache = Path(constants.HF_HUB_CACHE)
    for found in known_ggufs([*cache.glob("models--*/snapshots/*"), *folders]):
        try:
            kind, window = gguf_facts(found.files[0])
        except ModelLoadError:
            kind, window = "GGUF, damaged", None
        yield Model(found.name, bytes_of(found.files), kind, window)


def _described(name: str, folder: Path) -> Model | None:
    """Describe the model in a folder; None if none is there, or a part of one."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    safe = list(folder.glob(SAFE_WEIGHTS))
    other = [path for pattern in OTHER_WEIGHTS for path in folder.glob(pattern)]
    if not isinstance(config, dict) or not safe + other:
        return None
    return Model(
        name,
        bytes_of(folder.iterdir()),
        _weights(config, "safetensors" if safe else "pickle"),
        _window(config),
    )


def bytes_of(paths: Iterable[Path]) -> int:
    """Return the size of the files among the paths, those that links lead to included."""
    return sum(path.stat().st_size for path in paths if path.is_file())


def _weights(config: dict[str, Any], files: str) -> str:
    texts = _texts(config)
    quantized = config.get("quantization_config") or {}
    kind = quantized.get("quant_method") or next(
        (found for each in texts for key in ("dtype", "torch_dtype") if (found := each.get(key))),
        None,
    )
    return f"{kind} ({files})" if kind else files


def _window(config: dict[str, Any]) -> int | None:
    windows = (each.get("max_position_embeddings") for each in _texts(config))
    return next((window for window in windows if isinstance(window, int)), None)


def _texts(config: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """Return the configuration of the part that reads texts, and the whole one."""
    text = config.get("text_config")
    return (text, config) if isinstance(text, dict) else (config,)
