"""Remembers the fingerprints of models that were loaded, so that commands which only ask what a
model has in the catalog need not load it, nor PyTorch."""

from __future__ import annotations

import json
import logging
import platform
from importlib.metadata import version
from pathlib import Path

from blake3 import blake3
from huggingface_hub import try_to_load_from_cache

from kvlinker.base.errors import ModelLoadError
from kvlinker.engines.contract.gguf_files import gguf_files, state_of
from kvlinker.engines.contract.model_place import CONFIG, weight_files
from kvlinker.settings import Settings
from kvlinker.store.format.durability import replace_file

logger = logging.getLogger(__name__)

FOLDER = "models"
"""The folder in the state directory with a file for each model that was loaded, which holds its
fingerprint."""

DECISIVE = ("dtype", "device", "weights", "native", "state_inputs", "engine")
"""The settings on which a fingerprint depends, besides the model."""


def remember_fingerprint(settings: Settings, fingerprint: str) -> None:
    """Remember the fingerprint of the model that was loaded with these settings."""
    place = _place(settings)
    if place is None:
        return
    text = _text(fingerprint)
    try:
        if not place.is_file() or place.read_text() != text:
            place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(place, text.encode())
    except OSError as error:
        logger.warning("Searching by words loads the model: %s", error)


def remembered_fingerprint(settings: Settings) -> str | None:
    """Return the fingerprint of the model that the settings name; None where it was not loaded with
    them, or its files have changed since."""
    place = _place(settings)
    if place is None:
        return None
    try:
        text = place.read_text()
    except (OSError, ValueError):
        return None
    fingerprint = text.partition(" ")[0]
    return fingerprint if text == _text(fingerprint) else None


def _text(fingerprint: str) -> str:
    return f"{fingerprint} {blake3(fingerprint.encode()).hexdigest(8)}"


def _place(settings: Settings) -> Path | None:
    """Return the file that holds, or is to hold, the fingerprint; None for a model that has no
    files on this machine."""
    try:
        states = [state_of(path) for path in _files(settings.model)]
    except (ModelLoadError, OSError):
        return None
    if not states:
        return None
    versions = [version(name) for name in ("kvlinker", "torch", "transformers")]
    decisive = {name: getattr(settings, name) for name in DECISIVE}
    subject = json.dumps([states, decisive, versions, platform.machine()], default=str)
    return settings.state_dir / FOLDER / blake3(subject.encode()).hexdigest(16)


def _files(model: str) -> list[Path]:
    """Return the files that decide what a model computes; none where it has none on this machine.
    Raises ModelLoadError, OSError."""
    if ggufs := gguf_files(model):
        return list(ggufs)
    folder = Path(model)
    if not folder.is_dir():
        config = try_to_load_from_cache(model, CONFIG)
        if not isinstance(config, str):
            return []
        folder = Path(config).parent
    return [folder / CONFIG, *weight_files(folder)]
