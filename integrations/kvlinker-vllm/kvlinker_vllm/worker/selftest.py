"""Checks that linking is exact with vLLM's model, in every worker when it starts, since no list of
models can ensure it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvlinker.base.errors import UnsupportedModelError
from kvlinker.engines.contract.selftest import (
    CHUNK,
    GARBAGE,
    PROMPT_TOKENS,
    SCATTERED,
    TOLERANCE,
    SelfTestCheck,
)
from kvlinker.prompting.segments import Range
from kvlinker.store import ChunkKV
from kvlinker_vllm.adapter import AttentionLayer, BoundModel, VirtualSequences
from kvlinker_vllm.protocol.transfer_plan import CapturedChunk
from kvlinker_vllm.worker.layers import ChunkPart, own_heads, place
from kvlinker_vllm.worker.recording import ChunkCapture, RecordedRows, record_attention

FARTHEST = 1000
"""The most positions by which the prompt is moved."""

TOLERANCES = {torch.float32: TOLERANCE, torch.float16: 1e-2}
ROUGH_TOLERANCE = 5e-2
"""The tolerance in other dtypes, such as bfloat16, in which vLLM's rotary tables alone have errors
of 2e-3, and where the KV cache is rounded to fewer bits than the model."""

FURTHER_ON = 3.0
"""How many times the tolerance the whole prompt may change further on, in 16 bits: vLLM's rotary
tables are rounded to these, and each layer adds to that (7e-2 in 32 layers of random weights on an
H100)."""


def require_exact(bound: BoundModel, layers: Sequence[AttentionLayer]) -> None:
    """Compare hidden states over linked KV with those of the model's own pass, on a fixed random
    prompt. Raises UnsupportedModelError, with the figures, unless all checks pass. A window of
    fewer tokens than the prompt is refused, too.

    Uses the first blocks of the KV cache, in which nothing may lie yet, and leaves zeros there. All
    workers have to call it.
    """
    if bound.max_model_len < PROMPT_TOKENS:
        raise UnsupportedModelError(
            f"max_model_len is {bound.max_model_len}, but kvlinker checks models on {PROMPT_TOKENS}"
            " tokens."
        )
    subject = _Subject(bound, layers)
    try:
        failed = [check for check in _checks(subject) if not check.passed]
    finally:
        subject.fill(0, PROMPT_TOKENS, 0.0)
    if failed:
        figures = "; ".join(
            f"{check.name} ({check.meaning}): {check.error:.1e} of {check.allowed:.0e}"
            for check in failed
        )
        raise UnsupportedModelError(
            f"{type(bound.model).__name__} cannot be linked exactly in vLLM. Relative errors, of"
            f" those allowed: {figures}. Serve it without kvlinker, or report the model."
        )


def _checks(subject: _Subject) -> tuple[SelfTestCheck, ...]:
    moved = min(FARTHEST, subject.farthest)
    allowed = TOLERANCES.get(subject.bound.dtype, ROUGH_TOLERANCE)
    if subject.bound.has_rounded_cache:
        allowed = ROUGH_TOLERANCE
    (begin, end), length = CHUNK, PROMPT_TOKENS
    around = ((0, begin), (end, length))

    capture = subject.capture()
    with record_attention(subject.bound, subject.layers, [RecordedRows(0, length, 0, capture)]):
        own = subject.compute([(0, length)])
    if not own.isfinite().all():
        raise UnsupportedModelError(
            f"vLLM's own pass of {type(subject.bound.model).__name__} gives numbers that are not"
            " finite, with nothing linked, so that kvlinker cannot check it."
        )
    (chunk,) = capture.finish()
    kv = own_heads(subject.layers, subject.bound.dtype, chunk)

    for first, last in SCATTERED:
        subject.fill(first, last, GARBAGE)
    again = subject.compute(SCATTERED)
    recompute = SelfTestCheck(
        "recompute", "scattered tokens computed again over garbage", _error(again, own), allowed
    )

    there = subject.compute([(0, length)], moved=moved)
    relocate = SelfTestCheck(
        "relocate",
        f"the prompt computed {moved} positions further on",
        _error(there, own),
        allowed if subject.bound.dtype == torch.float32 else FURTHER_ON * allowed,
    )
    allowed = max(allowed, min(relocate.error, relocate.allowed))  # what the model itself does

    subject.fill(0, length, GARBAGE)
    subject.place(kv)
    link = SelfTestCheck(
        "link",
        "stored KV placed where it was computed",
        _error(subject.compute(around), own),
        allowed,
    )

    subject.fill(0, length, GARBAGE)
    subject.place(kv, moved=moved)
    placed = subject.compute(around, moved=moved)
    move = SelfTestCheck(
        "move", f"stored KV placed {moved} positions further on", _error(placed, there), allowed
    )
    return recompute, link, relocate, move


class _Subject:
    """The model under test, with a prompt whose token at position p lies in slot p of the first
    blocks, however far its rotary embedding is moved."""

    def __init__(self, bound: BoundModel, layers: Sequence[AttentionLayer]) -> None:
        self.bound = bound
        self.layers = layers
        self.farthest = bound.max_model_len - PROMPT_TOKENS
        self._tokens = np.random.default_rng(0).integers(0, bound.vocabulary, PROMPT_TOKENS)
        self._blocks = own_blocks(bound, PROMPT_TOKENS)

    def capture(self) -> ChunkCapture:
        chunk = CapturedChunk(key="0" * 64, begin=CHUNK[0], end=CHUNK[1])
        return ChunkCapture([chunk], self._tokens, self.layers, self.bound, with_scores=False)

    def compute(self, runs: Sequence[Range], *, moved: int = 0) -> Tensor:
        """Return the hidden states [tokens, hidden] of the last run, when all runs go through the
        model together."""
        positions = torch.cat([torch.arange(*run, device=self.bound.device) for run in runs])
        sequences = VirtualSequences(
            tokens=torch.from_numpy(self._tokens).to(self.bound.device)[positions],
            positions=positions + moved,
            slots=torch.stack([self._slots(group, positions) for group in self._groups]),
            query_lengths=[end - begin for begin, end in runs],
            lengths=[end for _, end in runs],
            block_ids=[self._blocks] * len(runs),
        )
        with torch.inference_mode():
            hidden = self.bound.forward(sequences, eager=True)
        begin, end = runs[-1]
        return hidden[begin - end :].float().clone()

    def place(self, kv: ChunkKV, *, moved: int = 0) -> None:
        """Place CHUNK's KV in its slots, with the rotary embedding of ``moved`` positions further
        on."""
        begin, end = CHUNK
        positions = torch.arange(begin, end, device=self.bound.device)
        parts = [
            [ChunkPart(kv, 0, end - begin, begin, positions + moved, self._slots(group, positions))]
            for group in self._groups
        ]
        with torch.inference_mode():
            place(self.layers, parts)

    def fill(self, begin: int, end: int, value: float) -> None:
        """Overwrite the KV of positions [begin, end)."""
        positions = torch.arange(begin, end, device=self.bound.device)
        for layer in self.layers:
            slots = self._slots(layer.group, positions)
            key, values = (
                torch.full(
                    (end - begin, layer.heads, dim),
                    value,
                    dtype=self.bound.dtype,
                    device=self.bound.device,
                )
                for dim in (layer.key_dim, layer.value_dim)
            )
            layer.write(key, values, slots)

    @property
    def _groups(self) -> range:
        return range(len(self.bound.groups))

    def _slots(self, group: int, positions: Tensor) -> Tensor:
        return self.bound.slots(group, self._blocks[group], positions)


def own_blocks(bound: BoundModel, tokens: int) -> list[range]:
    """Return the first blocks for ``tokens``, others for each group of layers, whose caches share
    their memory. Block 0 is vLLM's null block.

    Raises UnsupportedModelError if vLLM has too few.
    """
    blocks, first = [], 1
    for group in bound.groups:
        blocks.append(range(first, first + -(-tokens // group.block_size)))
        first = blocks[-1].stop
    if first > bound.blocks:
        raise UnsupportedModelError(
            f"vLLM has {bound.blocks} blocks for KV, of which kvlinker needs {first} to check the"
            " model; give it more memory (gpu_memory_utilization)."
        )
    return blocks


def _error(ours: Tensor, expected: Tensor) -> float:
    """Return the relative error of ours [tokens, hidden] from the last rows of the model's [tokens,
    hidden]."""
    expected = expected[-len(ours) :]
    return float((ours - expected).norm() / expected.norm())
