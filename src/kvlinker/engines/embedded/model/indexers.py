"""Indexers: parts of a layer's attention that pick, for each query, the tokens that it sees.

An indexer keeps something of every token (a small key, mostly), scores all tokens before a query by
it, and picks those with the highest scores. The model's own code picks: it is run over the linked
prompt, through a cache that returns the data of all tokens of a sequence, at their positions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from kvlinker.engines.embedded.model.rotary import Rotary

MASK, PLACES, CACHE, TABLES = (
    "attention_mask",
    "position_ids",
    "past_key_values",
    "position_embeddings",
)
"""The names of indexers' arguments: the tokens that are seen, their positions, the kept data, and
cos and sin."""


PICKED_BEFORE = "skip_topk"
"""The attribute by which attention says that it sees what the indexer before it has picked."""


@dataclass(frozen=True, slots=True)
class Indexer:
    """One layer's indexer, by the data that it keeps of each token: ``dim`` values, of which those
    from ``offset`` on are rotated by ``rotary``, if it has one."""

    dim: int
    rotary: Rotary | None = None
    offset: int = 0

    tables: Rotary | None = None
    """The rotary embedding whose cos and sin of all positions it takes; None if it takes those of
    its queries, or none."""

    def rotated(self, kept: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return what is kept of tokens, [tokens, dim], rotated by cos and sin [tokens, columns],
        as the model would rotate it."""
        assert self.rotary is not None, "the model rotates it itself"
        turned = kept.clone()
        part = slice(self.offset, None)
        self.rotary.rotate_as_model(kept[None, :, part], cos, sin, out=turned[None, :, part])
        return turned

    def handed(self, length: int) -> tuple[Tensor, Tensor] | None:
        """Return cos and sin of ``length`` positions, [length, columns] each, where it takes those
        of all."""
        return None if self.tables is None else self.tables.model_tables(length)


class LinkedCache:
    """Takes the place of a model's cache for one call of an indexer."""

    def __init__(self, linked: Callable[[Tensor], Tensor], length: int) -> None:
        """``linked`` takes what the indexer keeps of new tokens, [new, dim], and returns what is
        kept of all ``length`` tokens up to the last of them, [length, dim]."""
        self._linked = linked
        self._length = length
        self.keys = torch.empty(0).expand(1, 1, length, 0)

    @property
    def layers(self) -> Mapping[int, LinkedCache]:
        """Return this cache for any layer."""
        return defaultdict(lambda: self)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Count the tokens."""
        return self._length

    def update_indexer(self, kept: Tensor, layer_idx: int = 0) -> Tensor:
        """Return what is kept of all tokens, [..., length, dim]."""
        found = self._linked(kept.reshape(-1, kept.shape[-1]))
        return found.view(*kept.shape[:-2], -1, kept.shape[-1])

    update_index = update_indexer


class Queries(NamedTuple):
    """Tokens of one sequence for which an indexer is to pick."""

    owner: object
    positions: NDArray[np.int64]
    """Where they stand in their sequence, ascending: [queries]."""

    rows: Tensor
    """Which of the tokens that the call was made for they are: [queries]."""

    table_rows: Tensor
    """Which of the tokens that the pass was made for."""

    @property
    def length(self) -> int:
        """The number of positions up to the last of them."""
        return int(self.positions[-1]) + 1


@dataclass(frozen=True, slots=True, eq=False)
class IndexerCall:
    """One call of an indexer by a model, for all tokens that it computes."""

    module: nn.Module
    function: Callable[..., Tensor]
    arguments: Mapping[str, Any]

    @property
    def takes_scattered(self) -> bool:
        """True if it takes the position of each query; otherwise queries follow one another."""
        return PLACES in self.arguments

    @property
    def is_known(self) -> bool:
        """True if it is called in a known form: without a mask, or with one for all heads that
        marks the visible tokens or the padding."""
        mask = self.arguments.get(MASK)
        return mask is None or mask.ndim in (2, 3) or self.makes_masks

    @property
    def makes_masks(self) -> bool:
        """True if it makes a mask of attention's, picks for one query at a time, and takes cos and
        sin of all positions up to the last query's."""
        mask = self.arguments.get(MASK)
        return mask is not None and mask.ndim == 4 and TABLES in self.arguments

    def nothing(self) -> Tensor:
        """Return what the model goes on with, until its attention asks what was picked."""
        if self.makes_masks:
            return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self._hidden.device)
        return torch.zeros(1, 1, 1, dtype=torch.long, device=self._hidden.device)

    def picked(
        self,
        queries: Queries,
        linked: Callable[[Tensor], Tensor],
        tables: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Return which tokens the indexer picks: [groups of heads, queries, length], booleans.

        Of tokens with the same score, the first ones are picked. ``linked`` is what
        ``LinkedCache`` takes; rotary functions rotate by the model's own tables: ``tables``
        [length, columns] where it takes those of all positions.
        """
        given = {name: self._part(name, value, queries) for name, value in self.arguments.items()}
        if CACHE in self.arguments:
            given[CACHE] = LinkedCache(linked, queries.length)
        if tables is not None:
            given[TABLES] = tuple(table[None].to(self._hidden.dtype) for table in tables)
        picks = _picks.get() or Picks()
        with Picking(picks, self.module, queries.owner, queries.positions):
            found = self.function(self.module, **given)
        return self._mask(found, queries.length)

    @property
    def _hidden(self) -> Tensor:
        hidden: Tensor = self.arguments["hidden_states"]
        return hidden

    def _part(self, name: str, value: Any, queries: Queries) -> Any:
        """Return an argument for these queries alone."""
        device = self._hidden.device
        if name == MASK:
            return _seen(value.ndim, queries, device)
        if name == PLACES:
            return torch.from_numpy(queries.positions)[None].to(device)
        if name == TABLES:
            return tuple(table[:, queries.table_rows] for table in value)
        return value[:, queries.rows] if isinstance(value, Tensor) else value

    def _mask(self, found: Tensor, length: int) -> Tensor:
        """Return what the indexer returned, a mask, or numbers of tokens or of blocks, as booleans:
        the number -1 stands for none."""
        if self.makes_masks:
            return found.reshape(-1, *found.shape[-2:])
        size = int(getattr(self.module, "block_size", 1))
        blocks = -(-length // size)
        picks = found.reshape(-1, *found.shape[-2:]).long()
        mask = torch.zeros(*picks.shape[:2], blocks + 1, dtype=torch.bool, device=picks.device)
        mask.scatter_(-1, torch.where(picks < 0, blocks, picks), True)
        return mask[..., :blocks].repeat_interleave(size, dim=-1)[..., :length]


def _seen(dimensions: int, queries: Queries, device: torch.device) -> Tensor:
    """Return the mask of the tokens that these queries may see, [1, (1,) queries, length]; with two
    dimensions, the mask says that none of them is padding."""
    if dimensions == 2:
        return torch.ones(1, len(queries.positions), dtype=torch.bool, device=device)
    positions = torch.from_numpy(queries.positions).to(device)
    seen = torch.arange(queries.length, device=device) <= positions[:, None]
    return seen[(None,) * (dimensions - 2)]


class Picks:
    """Says which of the scores that an indexer computed are the highest."""

    def highest(
        self,
        module: nn.Module,
        owner: object,
        positions: NDArray[np.int64],
        scores: Tensor,
        k: int,
    ) -> Tensor:
        """Return the indices of the ``k`` highest ``scores`` [..., queries, candidates] of each
        query, the highest first: of equal ones, the first. The queries stand at ``positions`` of
        what is the ``owner``'s."""
        return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]


_picks: ContextVar[Picks | None] = ContextVar("kvlinker_picks", default=None)


@contextmanager
def picking_by(picks: Picks) -> Iterator[None]:
    """Make this thread's passes pick by ``picks``."""
    token = _picks.set(picks)
    try:
        yield
    finally:
        _picks.reset(token)


class Picking(TorchFunctionMode):
    """Replaces top-k by ``picks`` in a module that computes in this thread, for queries at these
    ``positions`` or for all of a text: top-k leaves open what it returns of equal scores.

    Indexers that pick for one query at a time list the tokens that it sees before. It is the last
    of these, so that their number is its position.
    """

    def __init__(
        self,
        picks: Picks,
        module: nn.Module,
        owner: object = None,
        positions: NDArray[np.int64] | None = None,
    ) -> None:
        super().__init__()
        self._picks = picks
        self._module = module
        self._owner = owner
        self._positions = positions
        self._listed = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.topk, Tensor.topk):
            return self._topk(*args, **(kwargs or {}))
        found = func(*args, **(kwargs or {}))
        if func in (torch.nonzero, Tensor.nonzero):
            self._listed = len(found)
        return found

    def _topk(self, scores: Tensor, k: int, dim: int = -1) -> torch.return_types.topk:
        assert dim in (-1, scores.ndim - 1), "candidates are in the last dimension"
        if scores.ndim == 1:
            indices = self._highest(np.array([self._listed - 1]), scores[None], k)[0]
        elif self._positions is None:
            indices = self._highest(np.arange(scores.shape[-2]), scores, k)
        else:
            indices = self._highest(self._positions, scores, k)
        return torch.return_types.topk((scores.gather(-1, indices), indices))

    def _highest(self, positions: NDArray[np.int64], scores: Tensor, k: int) -> Tensor:
        return self._picks.highest(self._module, self._owner, positions, scores, k)


def place_of(part: Tensor, whole: Tensor) -> int | None:
    """Return from which dimension on ``part`` [tokens, width] is in ``whole`` [tokens, dim]; None
    if it is not."""
    width = part.shape[-1]
    places = range(whole.shape[-1] - width + 1)
    return next((at for at in places if torch.equal(whole[:, at : at + width], part)), None)


def all_visible(tokens: int, device: torch.device) -> Tensor:
    """Return a mask [1, 1, tokens, tokens] that hides nothing and takes no memory: models with
    indexers make none themselves for attention that they do not know, and rely on one."""
    return torch.ones((), dtype=torch.bool, device=device).expand(1, 1, tokens, tokens)


def is_indexer(kind: type[nn.Module]) -> bool:
    """Return whether modules of this class pick tokens."""
    return "indexer" in kind.__name__.lower()
