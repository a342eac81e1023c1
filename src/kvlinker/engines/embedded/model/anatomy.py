"""The structure of a model's layers, as far as the engine uses it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile

from torch import nn

from kvlinker.engines.contract.cost import AttentionShape
from kvlinker.engines.embedded.model.indexers import Indexer
from kvlinker.engines.embedded.model.latents import Latents
from kvlinker.engines.embedded.model.rotary import Rotary
from kvlinker.engines.embedded.model.states.recurrence import Recurrence


@dataclass(frozen=True, slots=True)
class LayerShape(AttentionShape):
    """Describes one layer's attention.

    Where it keeps latents, its key is the one that all heads share, its value the latent
    (``Latents.kept``).
    """

    rotary: Rotary | None
    """How its keys are rotated; None if it has no rotary embedding."""

    latents: Latents | None = None
    """How it attends to latents; None if it keeps keys and values."""

    indexer: Indexer | None = None
    """Its own indexer, which picks the tokens that its queries see; None if it has none."""

    picker: int | None = None
    """The layer whose indexer picks the tokens that its queries see; None if they see all."""

    source: int | None = None
    """The layer whose keys and values it attends to; None if it has its own."""

    block: int = 0
    """The number of the decoder layer's call, among all of a pass, in which it is computed."""

    window: int | None = None
    """The positions before its own, this included, that a query sees; None if it sees all."""

    @property
    def values_per_token(self) -> int:
        if self.source is not None:
            return 0
        index = 0 if self.indexer is None else self.indexer.dim
        return super(LayerShape, self).values_per_token + index

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """The heads and dimensions of key, value and what its indexer keeps, as ``LayerKV`` has
        them."""
        own = (self.kv_heads, self.key_dim), (self.kv_heads, self.value_dim)
        return own if self.indexer is None else (*own, (1, self.indexer.dim))

    @property
    def expanded_values_per_token(self) -> int:
        """The number of values that one token's KV would have here if it were not latents."""
        if self.latents is None:
            return self.values_per_token
        index = 0 if self.indexer is None else self.indexer.dim
        return self.latents.expanded_values_per_token + index

    @property
    def operations_per_pair(self) -> int:
        if self.latents is not None:
            return self.latents.operations_per_pair
        return super(LayerShape, self).operations_per_pair


@dataclass(frozen=True)
class Anatomy:
    """The structure of a model's layers, as far as the engine uses it."""

    layers: tuple[LayerShape, ...]
    """The attentions, in the order in which the model computes them."""

    recurrences: tuple[Recurrence, ...]
    """The layers that keep a state, in the order in which the model computes it."""

    blocks: int
    """The number of the decoder layers' calls in a pass."""

    mingles: bool
    """True if a decoder layer has both."""

    called: frozenset[nn.Module] = frozenset()
    """The modules whose own code convolves tokens with those before, applies a rule to a state, or
    attends to latents: native code calls them whole."""

    @cached_property
    def window(self) -> int:
        """The largest number of tokens before a token that its convolution sees, in layers with a
        state."""
        return max((each.window for each in self.recurrences), default=0)

    def parts(self, index: int) -> tuple[Recurrence, ...]:
        """Return the parts of the layer that begins with this recurrence."""
        first, *others = self.recurrences[index:]
        return (first, *takewhile(lambda each: each.goes_on, others))

    @cached_property
    def picks(self) -> bool:
        """True if indexers pick the tokens that queries see in some layers."""
        return any(layer.picker is not None for layer in self.layers)

    @cached_property
    def only_convolves(self) -> bool:
        """True if only convolutions keep a state."""
        return all(each.rule is None for each in self.recurrences)


def keeping(layers: Sequence[LayerShape]) -> tuple[LayerShape, ...]:
    """Return the layers that have keys and values of their own: those that chunks and the pool
    keep."""
    return tuple(layer for layer in layers if layer.source is None)


def kept_by(layers: Sequence[LayerShape]) -> tuple[int, ...]:
    """Return, for each layer, which of ``keeping(layers)`` has the keys and values that it attends
    to."""
    sources = [
        index if layer.source is None else layer.source for index, layer in enumerate(layers)
    ]
    own = sorted(set(sources))
    return tuple([own.index(source) for source in sources])
