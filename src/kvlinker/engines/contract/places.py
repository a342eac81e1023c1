"""Computes the KV of chunks at later places in a row of texts (ours), when the engine has nothing
else to do.

Language models tell the things of a prompt apart by their place in a row (Feng and Steinhardt,
2023, "How do Language Models Bind Entities in Context?"). The KV of a chunk that was computed alone
says "the first in the row", so that several such chunks are mistaken for one another. KV that was
computed behind texts of its kind says at which place it stands.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence, Set
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from kvlinker.base.errors import EngineClosedError, StoreError
from kvlinker.base.types.chunks import LAST_PLACE, Chunk, chunk_key, place_keys
from kvlinker.linking.evidence import Variant
from kvlinker.prompting.segments import Range
from kvlinker.store import ChunkStore
from kvlinker.store.chunk_kv import ChunkKV, mean_with

logger = logging.getLogger(__name__)

ROW = LAST_PLACE + 1
"""The most chunks in a row."""

CONTEXTS = 4
"""The most contexts whose mean the KV of a chunk at a place becomes: what the texts before it say
is noise, which the mean over several has less of, and their number is the signal."""

ROW_QUEUE_LIMIT = 1024
"""The number of rows that wait to be computed; those that were wanted first are forgotten."""

COUNTED_CHUNKS = 65_536
"""The number of chunks whose KV's contexts are remembered: some hundred bytes each."""

ROW_ROOM = 1 / 4
"""The largest share of the largest tier's budget for the KV of a row, at all places. A larger one
would evict the KV of chunks at their first place, which requests under all policies use. Chosen by
hand."""

WANTED_SECONDS = 300.0
"""The seconds from a row's offer within which it is computed even if its chunks are not stored: KV
that is stored soon after a deletion is deleted again (``store.deletions``)."""


Background = Callable[[Callable[[], object]], object]
"""Runs a function that takes time in another thread."""

RowComputation = Callable[[Sequence[Chunk], str], "Future[tuple[ChunkKV, ...]]"]
"""Computes chunks of a tenant behind one another, behind the first one's ``prefix``, when the
engine has nothing else to do. The result is the KV of all but the first."""


class TenantLibrary(NamedTuple):
    """The ``Library`` of what is stored of one tenant's chunks."""

    store: ChunkStore
    fingerprint: str
    tenant: str
    find_variants: Callable[[Chunk, str], Sequence[Variant]] | None = None
    """Finds the tenant's variants of a chunk; None to show none."""

    def variants(self, chunk: Chunk) -> Sequence[Variant]:
        return () if self.find_variants is None else self.find_variants(chunk, self.tenant)

    def has(self, chunk: Chunk) -> bool:
        key = chunk_key(chunk, fingerprint=self.fingerprint, tenant=self.tenant)
        return self.store.tier_of(key) is not None


def circles(count: int) -> int:
    """Return in how many circles ``count`` chunks are computed, each of which has other
    neighbours."""
    return min(CONTEXTS, count - 1)


def orders(count: int, circle: int = 0) -> tuple[tuple[int, ...], ...]:
    """Return the orders in which ``count`` chunks are computed, as their indices: the circle of
    this number, begun with each of them, so that in as many orders each chunk stands at each place
    once."""
    step = circle // 2 + 1
    around = [index for begin in range(step) for index in range(begin, count, step)]
    if circle % 2:
        around.reverse()
    return tuple((*around[begin:], *around[:begin]) for begin in range(count))


@dataclass
class _Row:
    """Chunks that are computed behind one another, in one order after the other."""

    chunks: tuple[Chunk, ...]
    kept: frozenset[Chunk]
    """The chunks whose KV is kept; the others only stand before them."""

    tenant: str
    circle: int = 0
    """The number of the circle that is computed. The first gives each chunk KV at each place, later
    ones make it the mean over as many contexts more."""

    left: deque[tuple[Chunk, ...]] = field(default_factory=deque)
    """The orders of the circle that are not computed yet."""

    offered: float = field(default_factory=time.monotonic)
    first: dict[Chunk, ChunkKV] = field(default_factory=dict)
    """A circle's KV for the first later place, which is stored in the end: where it is, all is."""

    def begin(self, circle: int) -> None:
        """Begin the circle of this number."""
        count = len(self.chunks)
        ordered = (tuple(self.chunks[at] for at in each) for each in orders(count, circle))
        self.circle, self.left = circle, deque(ordered)


class PlaceBuilder:
    """Lets the engine compute chunks at places where they have no KV yet, one row of them at a
    time."""

    def __init__(
        self,
        store: ChunkStore,
        compute: RowComputation,
        background: Background,
        *,
        fingerprint: str,
        kv_bytes: Callable[[int], int],
        longest: int,
    ) -> None:
        """``kv_bytes`` counts the bytes of the KV of a number of tokens; ``longest`` is the most
        tokens that a row may have. All but ``offer`` and ``settle`` runs in ``background``, which
        must be a single thread."""
        self._store = store
        self._compute_row = compute
        self._background = background
        self._fingerprint = fingerprint
        self._kv_bytes = kv_bytes
        self._longest = longest
        self._waiting: dict[tuple[Chunk, ...], _Row] = {}
        self._later: OrderedDict[tuple[Chunk, ...], _Row] = OrderedDict()
        self._contexts: dict[str, int] = {}  # contexts, by key
        self._row: _Row | None = None
        self._has_warned = False
        self._settled: list[Future[None]] = []

    def offer(self, chunks: Sequence[Chunk], tenant: str) -> None:
        """Let the engine compute chunks that stand together, in a prompt or where they were
        created, behind one another, as far as they lack KV at a place. When no chunk lacks any, it
        computes them in other orders, so that their KV becomes the mean over several contexts.

        Those that are offered last come first. A tenant's own chunks never stand before shared
        ones. Returns at once; any thread may call it, and one that comes after the engine was
        closed changes nothing.
        """
        self._hand_over(partial(self._add, chunks, tenant))

    def settle(self) -> Future[None]:
        """Return a future that is done once all that was offered is computed, or given up. Any
        thread may call it."""
        settled: Future[None] = Future()
        self._background(partial(self._change, partial(self._settled.append, settled)))
        return settled

    def _hand_over(self, change: Callable[[], None]) -> None:
        """Let the background change what is wanted or known. Any thread may call it."""
        with suppress(RuntimeError):  # the background's thread has ended
            self._background(partial(self._change, change))

    def _change(self, change: Callable[[], None] = lambda: None) -> None:
        """Change what is wanted or known, and go on. A row that fails is given up."""
        try:
            change()
            self._begin_next()
        except EngineClosedError:
            self._row = None
            self._waiting.clear()
            self._later.clear()
            self._begin_next()
        except Exception as error:
            is_fault = not isinstance(error, StoreError)  # that of a full disk says all in words
            message = "Chunks could not be computed at other places: %s"
            logger.error(message, error, exc_info=is_fault)
            self._row = None
            self._background(self._change)

    def _add(self, chunks: Sequence[Chunk], tenant: str) -> None:
        own_texts = [chunk.at_place(0) for chunk in chunks if not chunk.contextual]
        texts = list(dict.fromkeys(own_texts))
        alike: defaultdict[tuple[tuple[int, ...], bool], list[Chunk]] = defaultdict(list)
        for chunk in texts:
            alike[chunk.prefix, chunk.shared].append(chunk)
        for (_, shared), own in alike.items():
            others = [chunk for chunk in texts if chunk.shared or not shared]
            places = min(len(others), ROW) - 1
            lacking, crude = [], []
            for chunk in own:
                key = self._key(chunk, tenant)
                if None in map(self._store.tier_of, place_keys(key)[:places]):
                    lacking.append(chunk)
                elif self._contexts.get(key, 0) < circles(places + 1):
                    crude.append(chunk)
            for row in self._rows(lacking, others, tenant):
                row.begin(0)
                self._waiting.pop(row.chunks, None)
                self._waiting[row.chunks] = row
            for row in self._rows(crude, others, tenant):
                self._compute_later(row)
        while len(self._waiting) > ROW_QUEUE_LIMIT:
            del self._waiting[next(iter(self._waiting))]

    def _compute_later(self, row: _Row, *, first: bool = False) -> None:
        """Enqueue a row whose chunks have KV for other orders, when no other row lacks any. Where
        too many wait, it is forgotten, until it is offered again."""
        if len(self._later) < ROW_QUEUE_LIMIT:
            self._later.setdefault(row.chunks, row)
            if first:
                self._later.move_to_end(row.chunks, last=False)

    def _rows(self, own: Sequence[Chunk], others: Sequence[Chunk], tenant: str) -> list[_Row]:
        """Divide a tenant's ``own`` chunks into rows, and fill these up with ``others``."""
        left = list(own)
        rows = []
        while left:
            kept = self._row_of(left[:1], left[1:])
            left = left[len(kept) :]
            chunks = self._row_of(kept, [chunk for chunk in others if chunk not in kept])
            if len(chunks) > 1:
                rows.append(_Row(tuple(chunks), frozenset(kept), tenant))
            elif len(others) > 1 and not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "A chunk of %d tokens gets no KV for later places: behind another one it is"
                    " longer than the model's window, or its KV takes more than %.0f%% of the"
                    " chunk store. The policy row computes it in full; a larger disk_space or"
                    " host_memory, or smaller chunks, mend that.",
                    len(kept[0]),
                    100 * ROW_ROOM,
                )
        return rows

    def _row_of(self, begun: Sequence[Chunk], others: Sequence[Chunk]) -> list[Chunk]:
        """Return a row that goes on with others, as many as it takes: by its length, and by what
        the store has room for."""
        room = self._store.largest_budget_bytes * ROW_ROOM
        row = list(begun)
        for chunk in others[: ROW - len(row)]:
            tokens = len(chunk) + sum(map(len, row))
            if (
                len(chunk.prefix) + tokens > self._longest
                or self._kv_bytes(tokens) * len(row) > room
            ):
                break
            row.append(chunk)
        return row

    def _begin_next(self) -> None:
        """Begin the next row, unless one is under way."""
        while self._row is None and self._waiting:
            _, row = self._waiting.popitem()
            self._begin_order(row)
        while self._row is None and self._later:
            _, row = self._later.popitem(last=False)
            self._begin_later_order(row)
        if self._row is None:
            for settled in self._settled:
                settled.set_result(None)
            self._settled.clear()

    def _is_wanted(self, row: _Row) -> bool:
        """Return whether a row is computed: not of chunks that may have been deleted so long ago
        that nobody would delete what comes out."""
        is_recent = time.monotonic() - row.offered < WANTED_SECONDS
        return is_recent or all(self._has(chunk, row.tenant) for chunk in row.kept)

    def _begin_order(self, row: _Row) -> None:
        """Compute the next order of a row's first circle that gives KV which is not stored."""
        if not self._is_wanted(row):
            return
        while row.left:
            ordered = row.left.popleft()
            if not all(self._has(chunk, row.tenant) for chunk in _placed(ordered, row.kept)):
                self._compute(row, ordered)
                return
        self._end_circle(row)

    def _begin_later_order(self, row: _Row) -> None:
        """Compute the next order of a row's later circles. Nothing is computed where its chunks' KV
        has as many contexts as the row gives them, or got none by the last circle, as after an
        eviction."""
        if not self._is_wanted(row):
            return
        if not row.left:
            contexts = self._contexts_of(row)
            if not row.circle < contexts < circles(len(row.chunks)):
                return
            row.begin(contexts)
        self._compute(row, row.left.popleft())

    def _end_circle(self, row: _Row) -> None:
        """Store what the row's circle gave for the first later place, and have the next circle
        computed later."""
        for chunk, kv in row.first.items():
            self._keep(row, chunk, kv)
        row.first.clear()
        self._compute_later(row, first=row.circle > 0)

    def _contexts_of(self, row: _Row) -> int:
        """Return how many contexts the KV of the row's chunks has at the least, as far as it is
        known from their first and last places; 0 where it was evicted."""
        contexts = {
            chunk: min(
                0 if kv is None else kv.contexts
                for place in (1, len(row.chunks) - 1)
                for kv in [self._store.get(self._key(chunk.at_place(place), row.tenant))]
            )
            for chunk in row.kept
        }
        if len(self._contexts) > COUNTED_CHUNKS:
            self._contexts.clear()
        self._contexts |= {self._key(chunk, row.tenant): at for chunk, at in contexts.items()}
        return min(contexts.values())

    def _compute(self, row: _Row, ordered: tuple[Chunk, ...]) -> None:
        computed = self._compute_row(ordered, row.tenant)
        self._row = row
        computed.add_done_callback(
            lambda done: self._hand_over(partial(self._note, row, ordered, done))
        )

    def _note(self, row: _Row, ordered: Sequence[Chunk], done: Future[tuple[ChunkKV, ...]]) -> None:
        """Keep what one order of the row has given, and begin the next one; in later circles, other
        rows may come between."""
        self._row = None
        kvs = dict(zip(ordered[1:], done.result(), strict=True))
        if not self._is_wanted(row):
            return  # the engine had no time for it until its chunks were deleted
        for chunk in _placed(ordered, row.kept):
            kv = kvs[chunk.at_place(0)]
            if chunk.place == 1:
                row.first[chunk] = kv
            else:
                self._keep(row, chunk, kv)
        if not row.circle:
            self._begin_order(row)
        elif row.left:
            self._compute_later(row, first=True)
        else:
            self._end_circle(row)

    def _keep(self, row: _Row, chunk: Chunk, kv: ChunkKV) -> None:
        """Store a chunk's KV at a place; in later circles the mean of it and what is stored, unless
        that has this circle's context already, as after a circle that was cut short."""
        key = self._key(chunk, row.tenant)
        stored = self._store.get_computed(key) if row.circle else None
        if stored is not None:
            if stored.contexts > row.circle:
                return
            kv = mean_with(kv, stored)
            self._store.delete(key)
        self._store.put(key, kv)

    def _has(self, chunk: Chunk, tenant: str) -> bool:
        return self._store.tier_of(self._key(chunk, tenant)) is not None

    def _key(self, chunk: Chunk, tenant: str) -> str:
        return chunk_key(chunk, fingerprint=self._fingerprint, tenant=tenant)


def _placed(ordered: Sequence[Chunk], kept: Set[Chunk]) -> list[Chunk]:
    """Return those of the later chunks in this order that are kept, at their places in it."""
    return [chunk.at_place(place) for place, chunk in enumerate(ordered) if place and chunk in kept]


def row_text(chunks: Sequence[Chunk]) -> tuple[list[int], list[Range]]:
    """Return the tokens of chunks behind one another, behind the first one's ``prefix``, and the
    positions [begin, end) of each."""
    tokens, spans = [*chunks[0].prefix], []
    for chunk in chunks:
        spans.append((len(tokens), len(tokens) + len(chunk)))
        tokens += chunk.tokens
    return tokens, spans
