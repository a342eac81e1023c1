"""Sequences over shared chunks with tokens of their own, and their attention by definition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvlinker.engines.contract.attention import AttentionOptions
from kvlinker.engines.embedded.attention.kernel import View
from tests.engines.embedded.toy_rotary import rotate_exactly, toy_rotary

STALE = 9.0
"""What hidden tokens' keys and values hold."""


@dataclass(frozen=True)
class Shape:
    """A layer's attention."""

    kv_heads: int = 2
    group: int = 2
    key_dim: int = 64
    value_dim: int = 64
    rotated: int | None = None
    """Dimensions with rotary embedding, all by default; 0: the layer has none."""

    pairing: str | None = "halves"
    factor: float = 1.0
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


@dataclass(frozen=True)
class Prompt:
    """A sequence: chunks and tokens of its own behind each other, some of the chunks' tokens
    computed anew."""

    parts: tuple[tuple[int | None, int], ...]
    """(chunk, tokens) in order; chunk None: tokens of its own."""

    recomputed: frozenset[int] = frozenset()
    """Positions in chunks that are its own."""

    queries: tuple[int, ...] = ()
    """Positions that are computed now."""

    @property
    def length(self) -> int:
        return sum(tokens for _, tokens in self.parts)


@dataclass
class Scene:
    """Queries of several sequences, and the segments that they see."""

    shape: Shape
    dtype: torch.dtype = torch.float32
    seed: int = 0
    views: list[View] = field(default_factory=list)
    segments: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    positions: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    sequences: list[tuple[slice, list[View]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        shape = self.shape
        self.generator = torch.Generator().manual_seed(self.seed)
        self.heads = shape.kv_heads * shape.group
        self.width = shape.key_dim if shape.rotated is None else shape.rotated
        self.rotary = None
        if self.width:
            self.rotary = toy_rotary(
                shape.key_dim, self.width, pairing=shape.pairing, factor=shape.factor
            )
        self.options = AttentionOptions(
            scale=1.3 * shape.key_dim**-0.5,
            window=shape.window,
            softcap=shape.softcap,
            sinks=self.random(self.heads) if shape.sinks else None,
        )

    def random(self, *size: int) -> Tensor:
        return torch.randn(*size, generator=self.generator).to(self.dtype)

    def rotated(self, heads: Tensor, positions: Tensor) -> Tensor:
        """Rotated in fp64."""
        if not self.width:
            return heads.double()
        shape = self.shape
        return rotate_exactly(
            heads, positions, self.width, pairing=shape.pairing, factor=shape.factor
        )

    def add_segment(self, positions: Sequence[int]) -> int:
        """A segment with random keys, rotated for the positions, amid NaN in a larger pool."""
        shape, at = self.shape, torch.as_tensor(positions)
        key = self.rotated(self.random(shape.kv_heads, len(at), shape.key_dim), at).to(self.dtype)
        self.segments.append(
            (_pooled(key, 3), _pooled(self.random(shape.kv_heads, len(at), shape.value_dim), 5))
        )
        return len(self.segments) - 1

    def add_sequence(self, prompt: Prompt) -> None:
        """Its queries join the batch; the chunks are segments 0 to …, which have been added
        before."""
        rows = slice(len(self.positions), len(self.positions) + len(prompt.queries))
        views, own, start = [], set(prompt.recomputed), 0
        for chunk, tokens in prompt.parts:
            if chunk is None:
                own.update(range(start, start + tokens))
            else:
                hidden = np.array([position in own for position in range(start, start + tokens)])
                if hidden.any() or start % 2:
                    views.append(View(chunk, rows, start, start, 0, tokens, hidden))
                else:
                    views.append(View(chunk, rows, start, start, 0, tokens))
            start += tokens
        if own:
            at = np.array(sorted(own))
            unused = self.seed % 3  # keys of others in the same pool
            segment = self.add_segment([*[0] * unused, *at, *at[-1:]])
            positions = np.array([*[-1] * unused, *at, at[-1] + 1])
            private = View(segment, rows, 0, 0, unused, unused + len(at), None, positions)
            if at[-1] - at[0] + 1 == len(at):
                private = replace(private, start=int(at[0]) - unused, positions=None)
            views.append(private)
        self.views.extend(views)
        self.sequences.append((rows, views))
        self.positions = np.concatenate([self.positions, np.array(prompt.queries, np.int64)])

    def finish(self) -> None:
        """Make the queries."""
        self.query = self.random(len(self.positions), self.heads, self.shape.key_dim).transpose(
            0, 1
        )

    def computed(self, kernel: Any, views: Sequence[View] | None = None) -> Tensor:
        """The kernel's result: [queries, heads, value_dim]."""
        size = len(self.positions), self.heads, self.shape.value_dim
        output = torch.full(size, float("nan"), dtype=self.dtype)
        plan = kernel.plan(self.views if views is None else views, self.positions)
        kernel.attend(plan, self.query, self.segments, self.rotary, self.options, output=output)
        return output

    def expected(self, *, magnitude: bool = False) -> Tensor:
        """Softmax attention over every sequence's dense KV in fp64; with ``magnitude``, over the
        values' amounts."""
        output = torch.zeros(
            len(self.positions), self.heads, self.shape.value_dim, dtype=torch.float64
        )
        for rows, views in self.sequences:
            key, value, there = self.dense(views)
            at = torch.from_numpy(self.positions[rows])
            scores = self.dense_scores(at, self.rotated(self.query[:, rows], at), key, there)
            sinks = (
                torch.full((self.heads,), float("-inf"))
                if self.options.sinks is None
                else self.options.sinks
            )
            scores = torch.cat(
                [scores, sinks.double()[:, None, None].expand(-1, len(at), 1)], dim=-1
            )
            weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)[..., :-1]
            values = value.abs() if magnitude else value
            output[rows] = (weights @ values.repeat_interleave(self.shape.group, 0)).transpose(0, 1)
        return output

    def dense_scores(self, at: Tensor, query: Tensor, key: Tensor, there: Tensor) -> Tensor:
        """Logits [heads, queries, length] of rotated queries and a sequence's dense keys."""
        scores = (
            query @ key.repeat_interleave(self.shape.group, 0).transpose(1, 2) * self.options.scale
        )
        if self.options.softcap is not None:
            scores = self.options.softcap * torch.tanh(scores / self.options.softcap)
        positions = torch.arange(key.shape[1])
        hidden = (positions > at[:, None]) | ~there
        if self.options.window is not None:
            hidden |= positions <= at[:, None] - self.options.window
        return scores.masked_fill(hidden, float("-inf"))

    def dense(self, views: Sequence[View]) -> tuple[Tensor, Tensor, Tensor]:
        """Key and value by position, and which positions there are: all keys rotated absolutely."""
        shape = self.shape
        length = 1 + max((int(_positions(view).max()) for view in views), default=0)
        key = torch.zeros(shape.kv_heads, length, shape.key_dim, dtype=torch.float64)
        value = torch.zeros(shape.kv_heads, length, shape.value_dim, dtype=torch.float64)
        there = torch.zeros(length, dtype=torch.bool)
        for view in views:
            seen = np.arange(view.first, view.last)
            if view.hidden is not None:
                seen = seen[~view.hidden[seen]]
            at = torch.from_numpy(_positions(view)[seen])
            assert not there[at].any(), "a position is there twice"
            there[at] = True
            offset = torch.full((len(seen),), view.rotary_start)
            moved = self.rotated(self.segments[view.segment][0][:, seen], offset)
            moved[..., : self.width] /= shape.factor  # which the stored key has already
            key[:, at] = moved
            value[:, at] = self.segments[view.segment][1][:, seen].double()
        return key, value, there


def _positions(view: View) -> NDArray[np.int64]:
    return (
        view.start + np.arange(view.last) if view.positions is None else view.positions[: view.last]
    )


def _pooled(tensor: Tensor, before: int) -> Tensor:
    """The tensor as a part of a larger pool that holds NaN elsewhere."""
    heads, rows, dim = tensor.shape
    pool = torch.full((heads, before + rows + 1, dim), float("nan"), dtype=tensor.dtype)
    pool[:, before : before + rows] = tensor
    return pool[:, before : before + rows]


def make_scene(
    chunks: Sequence[int],
    prompts: Sequence[Prompt],
    shape: Shape | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Scene:
    """A scene over chunks of these lengths."""
    scene = Scene(shape or Shape(), dtype, seed)
    for tokens in chunks:
        scene.add_segment(range(tokens))
    for prompt in prompts:
        scene.add_sequence(prompt)
    for rows, views in scene.sequences:
        _spoil(scene, rows, views)
    scene.finish()
    return scene


def _spoil(scene: Scene, rows: slice, views: Sequence[View]) -> None:
    """Whoever sees what all hide gets it wrong."""
    for view in views:
        sharing = [other for other in scene.views if other.segment == view.segment]
        masks = [other.hidden for other in sharing if other.hidden is not None]
        if len(masks) == len(sharing):
            hidden = np.logical_and.reduce(masks)
            for tensor in scene.segments[view.segment]:
                tensor[:, torch.from_numpy(hidden)] = STALE


def linked(
    order: Sequence[int],
    chunks: Sequence[int],
    *,
    before: int = 0,
    behind: int = 1,
    recompute: int = 0,
    decoding: bool = False,
) -> Prompt:
    """Chunks behind each other with tokens of its own around them, and the first ``recompute`` of
    every chunk. It computes all of its own tokens, or the last alone."""
    parts: list[tuple[int | None, int]] = [(None, before)] if before else []
    recomputed: set[int] = set()
    start = before
    for chunk in order:
        parts.append((chunk, chunks[chunk]))
        recomputed.update(range(start, start + min(recompute, chunks[chunk])))
        start += chunks[chunk]
    parts.append((None, behind))
    own = sorted({*range(before), *recomputed, *range(start, start + behind)})
    return Prompt(tuple(parts), frozenset(recomputed), tuple(own[-1:] if decoding else own))


def random_scene(seed: int, shape: Shape, *, dtype: torch.dtype, most: int = 90) -> Scene:
    """Sequences over the same chunks in any order, some of them twice, with any tokens computed
    anew and any of their own tokens computed now."""
    rng = np.random.default_rng(seed)
    chunks = [int(rng.integers(1, most)) for _ in range(rng.integers(1, 5))]
    prompts = []
    for _ in range(rng.integers(1, 6)):
        parts: list[tuple[int | None, int]] = []
        for chunk in rng.integers(0, len(chunks), rng.integers(0, 5)):
            if rng.random() < 0.4:
                parts.append((None, int(rng.integers(1, 40))))
            parts.append((int(chunk), chunks[chunk]))
        if rng.random() < 0.7 or not parts:
            parts.append((None, int(rng.integers(1, 60))))
        prompt = Prompt(tuple(parts))
        share = rng.choice([0.0, 0.05, 0.5, 1.0])
        recomputed = frozenset(np.flatnonzero(rng.random(prompt.length) < share).tolist())
        kind = rng.integers(3)
        if kind == 0:
            queries = [prompt.length - 1]  # decoding
        elif kind == 1:
            queries = np.flatnonzero(rng.random(prompt.length) < rng.random()).tolist() or [0]
        else:
            begin = int(rng.integers(prompt.length))
            queries = list(range(begin, prompt.length))
        prompts.append(replace(prompt, recomputed=recomputed, queries=tuple(queries)))
    return make_scene(chunks, prompts, shape, dtype=dtype, seed=seed)
