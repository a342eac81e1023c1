"""Names the tensors in a chunk file that layers with a state store of a chunk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvlinker.store.chunk_kv import ChunkState
from kvlinker.store.lazy_torch import torch

PREFIX = "state."
_MIXED, _GATE, _FACTOR, _OFFSET, _INNER = "mixed", "gate", "factor", "offset", "inner"


def named_states(states: Sequence[ChunkState]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of all layers' states with their names, in order."""
    for index, state in enumerate(states):
        parts = [_MIXED, *(f"{_GATE}.{number}" for number in range(len(state.gates)))]
        if state.effect is not None:
            parts += [_FACTOR, _OFFSET]
        parts += [f"{_INNER}.{number}" for number in range(len(state.inner))]
        for part, tensor in zip(parts, state.tensors, strict=True):
            yield f"{PREFIX}{index:04d}.{part}", tensor


def states_of(tensors: Sequence[tuple[str, torch.Tensor]]) -> tuple[ChunkState, ...]:
    """Return the states that ``named_states`` names so. Raises ValueError for anything else."""
    layers: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors:
        layer, _, part = name.removeprefix(PREFIX).partition(".")
        layers.setdefault(layer, {})[part] = tensor
    states = tuple(_state(parts) for parts in layers.values())
    if [name for name, _ in named_states(states)] != [name for name, _ in tensors]:
        raise ValueError("the states are not those of layers in order")
    return states


def _state(parts: dict[str, torch.Tensor]) -> ChunkState:
    gates, inner = (
        tuple(tensor for name, tensor in parts.items() if name.startswith(start))
        for start in (_GATE, _INNER)
    )
    effect = (parts[_FACTOR], parts[_OFFSET]) if {_FACTOR, _OFFSET} <= parts.keys() else None
    state = ChunkState(parts.get(_MIXED, torch.empty(0)), gates, effect, inner)
    edges = {len(gate) for gate in gates}
    uneven = len(edges) > 1 or len({len(part) for part in inner}) > 1
    if uneven or len(state.mixed) < max(edges, default=1):
        raise ValueError("a layer's tensors differ in tokens")
    if inner and ((gates and effect is None) or len(inner) != 1 + len(gates)):
        raise ValueError("a layer's inner tokens are not whole")
    if effect is not None and not effect[0].ndim == effect[1].ndim == 3:
        raise ValueError("what a layer's tokens do to a state is not a map")
    return state
