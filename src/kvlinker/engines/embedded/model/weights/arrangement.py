"""Puts the weights of a loaded model's linear layers in the order in which the processor reads them
fastest.

Decoding reads every weight once per step, and does little else. So weights are packed as oneDNN
wants them, and layers that take the same input, such as the projections to queries, keys and
values, are multiplied by one matrix. Weights in fewer bits are read in less time.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from kvlinker.base.loading import Report, unreported
from kvlinker.engines.contract.grouped_codes import joined
from kvlinker.engines.contract.model_files import expert_counts
from kvlinker.engines.embedded.model.decoder import decoder_layers
from kvlinker.engines.embedded.model.memory import drop_mapped, mapped_files, return_freed
from kvlinker.engines.embedded.model.weights.coded import CodedWeight
from kvlinker.engines.embedded.model.weights.linears import MatrixLinear, SharedLinear, SharedMatrix
from kvlinker.engines.embedded.model.weights.matrices import (
    BlockedMatrix,
    Matrix,
    packed_matrix,
    packs,
)
from kvlinker.engines.embedded.model.weights.native_products import native_products
from kvlinker.engines.embedded.model.weights.native_quantized import (
    GroupedMatrix,
    NativeInt4Matrix,
    NativeInt8Matrix,
    multiplied_in_int8,
)
from kvlinker.engines.embedded.model.weights.quantized import (
    Int4Matrix,
    Int8Matrix,
    quantise_by_torchao,
)
from kvlinker.engines.embedded.model.weights.tied_embedding import share_with_embeddings
from kvlinker.settings import WeightFormat

logger = logging.getLogger(__name__)

NOTHING: Mapping[nn.Module, Tensor] = MappingProxyType({})

SPARE_SHARE = 0.18
"""The most additional bytes while a model's weights are packed, as a share of the model's."""

QuantisedMatrix = type[Int8Matrix | Int4Matrix | NativeInt8Matrix | NativeInt4Matrix]

QUANTISED: Mapping[str, tuple[QuantisedMatrix, QuantisedMatrix]] = {
    "int8": (NativeInt8Matrix, Int8Matrix),
    "int4": (NativeInt4Matrix, Int4Matrix),
}
"""The matrices of the formats in which weights have fewer than 16 bits, on a CPU: with native code,
and without."""

OUTPUT_MINIMUM = 32
"""Layers with fewer outputs stay plain: there is nothing to gain, and oneDNN rounds these otherwise
when packed."""


class LinearCalls:
    """Records what a forward pass did with the linear layers of a model."""

    def __init__(self) -> None:
        self.calls: defaultdict[nn.Linear, list[tuple[Tensor, int]]] = defaultdict(list)
        """The tensors that each was called with, and the hash of what was in them then; another
        module may have changed it since."""

        self.ran: set[nn.Module] = set()
        """All modules that were called."""

    def enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Note that a module is called with ``args``."""
        self.ran.add(module)
        if type(module) is nn.Linear and args:
            (given,) = args
            content = hash(given.float().cpu().numpy().tobytes())
            self.calls[module].append((given, content))


@contextmanager
def watch_linears(model: nn.Module) -> Iterator[LinearCalls]:
    """Record what the forward pass of ``model`` in the block does with its linear layers."""
    seen = LinearCalls()
    with ExitStack() as hooks:
        for module in model.modules():
            hooks.enter_context(module.register_forward_pre_hook(seen.enter))
        yield seen


@torch.no_grad()
def arrange_weights(
    model: Any,
    seen: LinearCalls,
    weights: WeightFormat = "auto",
    sampled: Mapping[nn.Module, Tensor] = NOTHING,
    *,
    native: bool = True,
    report: Report = unreported,
) -> None:
    """Put the weights of the linear layers of ``model`` in the format ``weights``, and pack them
    where packed ones are faster; layers that took the same input in the forward pass ``seen`` get
    one matrix.

    Each plain weight is freed as soon as there is another. A layer is left as it is where it was
    not called although the module around it ran, for that may read the weight by itself; and where
    packing would take too much memory, as with the tied embeddings of a small model. In 8 and 4
    bits are the decoder layers' weights, except routers; the head and embeddings are not. By
    weights in 8 bits, inputs in 8 bits are multiplied where those ``sampled`` of a layer can be
    rounded so. Those in codes of a GGUF file are multiplied by as they are. Without ``native``,
    PyTorch's kernels and oneDNN's multiply by all of them.

    Raises ModelLoadError for a format that needs a library which is not installed.
    """
    return_freed()  # what checking the model took
    most = int((1 + SPARE_SHARE) * _size(model))
    first = next(model.parameters())
    groups = _groups(model, seen)
    files = mapped_files()
    groups = _arrange_coded(model, groups, files)
    if weights in QUANTISED:
        inside = {part for layer in decoder_layers(model) for part in layer.modules()}
        experts = expert_counts(model.config)
        chosen = [
            group
            for group in groups
            if all(_quantises(place.linear, inside, experts) for place in group)
        ]
        groups = [group for group in groups if group not in chosen]
        if first.device.type != "cpu":
            linears = {place.linear for group in chosen for place in group}
            quantise_by_torchao(model, linears, bits=8 if weights == "int8" else 4)
        else:
            blocked, portable = QUANTISED[weights]
            kind = blocked if native and native_products() is not None else portable
            taken = [
                group for group in chosen if all(kind.takes(place.linear.weight) for place in group)
            ]
            groups += [group for group in chosen if group not in taken]
            for index, group in enumerate(taken):
                report("arranging", index / len(taken))
                rows = sampled.get(group[0].linear)
                chooses = kind is NativeInt8Matrix
                made = partial(NativeInt8Matrix, sampled=rows) if chooses else kind
                _replace(model, group, made, files)
            if kind is NativeInt8Matrix:
                logger.info("%s.", multiplied_in_int8(model))
    in_blocks = [
        group
        for group in groups
        if all(BlockedMatrix.takes(place.linear.weight, native=native) for place in group)
    ]
    pack = partial(_pack, model, files=files, report=report)
    pack(in_blocks, BlockedMatrix, spare=most - _size(model))
    if packs(first.dtype, first.device):
        others = [group for group in groups if group not in in_blocks]
        pack(others, partial(packed_matrix, native=native), spare=most - _size(model))


def _size(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def _quantises(
    linear: nn.Linear, inside: Collection[nn.Module], expert_counts: Collection[int]
) -> bool:
    """Return whether the layer's weight may be in 8 or 4 bits; a layer with one output per expert
    is a router."""
    return linear in inside and linear.out_features not in expert_counts


def _pack(
    model: nn.Module,
    groups: Sequence[Sequence[_Place]],
    kind: Callable[[Tensor], Matrix],
    *,
    spare: int,
    files: Collection[range],
    report: Report,
) -> None:
    """Pack the weights of the groups for which ``spare`` bytes of memory are enough, as matrices of
    this kind."""
    for index, group in enumerate(groups):
        report("arranging", index / len(groups))
        nbytes = sum(place.linear.weight.nbytes for place in group)
        if nbytes * (1 if len(group) == 1 else 2) <= spare:
            spare -= _replace(model, group, kind, files)


def _replace(
    model: nn.Module,
    group: Sequence[_Place],
    kind: Callable[[Tensor], Matrix],
    files: Collection[range],
) -> int:
    """Put a matrix of this kind in the places of the group's layers, and free their weights, which
    may lie in mapped ``files``; return the bytes of those that others still need."""
    weights = [place.linear.weight for place in group]
    return _put(model, group, kind(weights[0] if len(group) == 1 else torch.cat(weights)), files)


def _put(
    model: nn.Module, group: Sequence[_Place], matrix: Matrix, files: Collection[range]
) -> int:
    """Put ``matrix`` in the places of the group's layers, as ``_replace`` does."""
    linears = [place.linear for place in group]
    weights = [linear.weight for linear in linears]
    is_tied = any(place.is_tied for place in group)
    if len(group) == 1:
        group[0].put(MatrixLinear(linears[0], matrix))
        if is_tied:
            share_with_embeddings(model, weights[0], matrix)
    else:
        shared = SharedMatrix(matrix, linears)
        for index, place in enumerate(group):
            place.put(SharedLinear(place.linear, shared, index))
    needed = {id(weight) for weight in model.parameters()} if is_tied else ()
    kept = 0
    for weight in weights:
        if id(weight) in needed:
            kept += weight.nbytes
        else:
            drop_mapped(weight, files)
    del weight, weights
    return_freed()
    return kept


def _arrange_coded(
    model: nn.Module, groups: Sequence[list[_Place]], files: Collection[range]
) -> list[list[_Place]]:
    """Make layers whose weights are in codes multiply by them: those of a group together that are
    of one form, and neighbours in the file. Return the layers that are left."""
    left: list[list[_Place]] = []
    for group in groups:
        runs: list[list[_Place]] = []
        for place in group:
            weight = place.linear.weight
            before = runs[-1][-1].linear.weight if runs else None
            if isinstance(weight, CodedWeight) and isinstance(before, CodedWeight):
                goes_on = joined(before.place, weight.place)
            else:
                goes_on = type(weight) is type(before)
            if goes_on:
                runs[-1].append(place)
            else:
                runs.append([place])
        for run in runs:
            weights = [place.linear.weight for place in run]
            coded = [weight for weight in weights if isinstance(weight, CodedWeight)]
            if coded:
                places = [weight.place for weight in coded]
                _put(model, run, GroupedMatrix(coded[0].content, places), files)
            else:
                left.append(run)
    return left


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a linear layer in a model."""

    owner: nn.Module
    name: str
    linear: nn.Linear

    is_tied: bool
    """True if another module has the same weight."""

    def put(self, other: nn.Linear) -> None:
        """Put another layer here, and free the weight of the one that was."""
        setattr(self.owner, self.name, other)
        self.linear._parameters.clear()


def _groups(model: nn.Module, seen: LinearCalls) -> list[list[_Place]]:
    """Return the layers that may be replaced, in the model's order; those that take the same input
    are together."""
    places: defaultdict[nn.Linear, list[_Place]] = defaultdict(list)
    owners = Counter(
        id(weight) for module in model.modules() for weight in module.parameters(recurse=False)
    )
    for owner in model.modules():
        for name, child in owner.named_children():
            if type(child) is nn.Linear:
                places[child].append(_Place(owner, name, child, owners[id(child.weight)] > 1))
    groups: defaultdict[tuple[object, ...], list[_Place]] = defaultdict(list)
    for linear, (place, *others) in places.items():
        calls = seen.calls[linear]
        reads_weight = place.owner in seen.ran and not calls
        if others or reads_weight or linear.out_features < OUTPUT_MINIMUM:
            continue
        input_of = [(id(given), content) for given, content in calls]
        together = (
            (place.owner, *input_of, linear.bias is None) if len(input_of) == 1 else (linear,)
        )
        groups[together].append(place)
    return list(groups.values())
