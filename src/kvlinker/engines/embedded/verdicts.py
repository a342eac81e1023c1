"""Remembers which checks a model has passed on this machine, so that its next start need not repeat
them."""

from __future__ import annotations

import json
import logging
import os
import platform
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path

import torch
from blake3 import blake3
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from kvlinker.engines import native
from kvlinker.store.format.durability import replace_file

logger = logging.getLogger(__name__)

FOLDER = "checks"
"""The folder in the state directory that holds a file for each check that was passed."""


class Verdicts:
    """Remembers the checks that one model has passed with these versions, on this kind of
    processor.

    A check that was passed is a file that says in full what was checked: the file's name is the
    hash of its text. So a file that is damaged, or about anything else, is none. Where files cannot
    be written, checks are repeated.
    """

    def __init__(self, state_dir: Path, model: Mapping[str, object]) -> None:
        """``model`` describes the model: its content, and the settings on which checks depend."""
        self._folder = state_dir / FOLDER
        self._model = model

    def passed(self, check: str) -> bool:
        """Return whether the model has passed the check ``check``."""
        text = self._text(check)
        try:
            return self._place(text).read_bytes() == text
        except OSError:
            return False

    def remember(self, check: str) -> None:
        """Remember that the model has passed the check ``check``."""
        text = self._text(check)
        self._write(self._place(text), text)

    def remember_tensors(self, check: str, found: Mapping[str, Tensor]) -> None:
        """Remember what the check ``check``, which the model has passed, has found; it takes the
        place of what other versions found."""
        content = save(dict(found))
        if self._write(self._place_of_tensors(check), content):
            self.remember(_with_content(check, content))

    def tensors(self, check: str) -> dict[str, Tensor] | None:
        """Return what the check ``check`` has found; None if it was not passed yet."""
        try:
            content = self._place_of_tensors(check).read_bytes()
            return load(content) if self.passed(_with_content(check, content)) else None
        except (OSError, SafetensorError):
            return None

    def _write(self, place: Path, content: bytes) -> bool:
        """Write a file of the folder; return whether the disk took it."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(place, content)
        except OSError as error:
            logger.warning("The model is checked again next time: %s", error)
            return False
        return True

    def _place_of_tensors(self, check: str) -> Path:
        said = json.dumps({"found by": check, "model": self._model}, sort_keys=True, default=str)
        return self._folder / f"{blake3(said.encode()).hexdigest(16)}.safetensors"

    def _text(self, check: str) -> bytes:
        said = {"check": check, "model": self._model, "made by": surroundings()}
        return json.dumps(said, sort_keys=True, indent=1, default=str).encode()

    def _place(self, text: bytes) -> Path:
        return self._folder / f"{blake3(text).hexdigest(16)}.json"


def _with_content(check: str, content: bytes) -> str:
    """Return the name of the check that has found just this."""
    return f"{check}, which found {blake3(content).hexdigest()}"


@cache
def surroundings() -> Mapping[str, object]:
    """Describe all that computes besides the model: versions, kvlinker's own code, native code,
    and the processor."""
    return {
        "kvlinker": version("kvlinker"),
        "code": _own_code(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "native": native.description(),
        "processor": [platform.machine(), torch.cpu.get_capabilities()],
        "kernels": torch.backends.cpu.get_cpu_capability(),
        "instructions": {name: value for name, value in os.environ.items() if name in INSTRUCTIONS},
    }


INSTRUCTIONS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "CXX")
"""The variables of the environment that choose instructions, or what native code is compiled by."""


def _own_code() -> str:
    """Return a hash of the names, sizes and times of kvlinker's files that compute."""
    folder = Path(native.__file__).parents[2]
    files = [
        (str(file.relative_to(folder)), status.st_size, status.st_mtime_ns)
        for part in ("engines", "linking", "store", "base")
        for file in sorted((folder / part).rglob("*"))
        if file.suffix in (".py", ".cpp", ".h", ".so")
        for status in (file.stat(),)
    ]
    return blake3(json.dumps(files).encode()).hexdigest(16)


def code_beside(folder: Path) -> str:
    """Return a hash of the code that comes with a model in ``folder``."""
    digest = blake3()
    for file in sorted(folder.glob("*.py")):
        digest.update(f"{file.name} {file.stat().st_size} ".encode() + file.read_bytes())
    return digest.hexdigest(16)
