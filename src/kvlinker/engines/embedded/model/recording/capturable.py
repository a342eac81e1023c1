"""Says of a model what graphs of its steps on a GPU are made from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from kvlinker.engines.contract.model_files import expert_counts
from kvlinker.engines.embedded.model.anatomy import Anatomy
from kvlinker.engines.embedded.model.recording.trace import UnrecordableError

WAITING_ROPES = ("dynamic", "longrope")
"""Kinds of rotary embeddings whose modules ask how far positions go."""


@dataclass(frozen=True, slots=True)
class Capturable:
    """A model whose steps graphs can compute."""

    windows: tuple[int | None, ...]
    """The window of each layer's attention."""

    @classmethod
    def of(cls, model: Any, anatomy: Anatomy) -> Capturable:
        """Raises UnrecordableError for what graphs are not made of."""
        if anatomy.recurrences:
            raise UnrecordableError("graphs of a GPU do not keep states")
        if anatomy.picks:
            raise UnrecordableError("indexers pick the tokens that are seen")
        if any(layer.latents is not None for layer in anatomy.layers):
            raise UnrecordableError("graphs of a GPU do not attend to latents")
        if any(count > 1 for count in expert_counts(model.config)):
            raise UnrecordableError("its experts wait for the GPU")
        if any(kind in WAITING_ROPES for part in model.modules() for kind in _ropes(part)):
            raise UnrecordableError("its rotary embedding waits for the GPU")
        return cls(tuple(layer.window for layer in anatomy.layers))


def _ropes(module: nn.Module) -> Iterable[str]:
    """Return the kinds of rotary embeddings that a module computes."""
    found = getattr(module, "rope_type", ())
    return (found,) if isinstance(found, str) else found.values() if found else ()
