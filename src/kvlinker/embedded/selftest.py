"""Checks that linking is exact with a model. The checks run when it is loaded, and under ``kvlinker check``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvlinker.embedded.execution.batch import Batch, Capture, OwnTokens, Run, SharedChunk, Sight
from kvlinker.embedded.execution.runner import Runner
from kvlinker.embedded.kv_cache.pool import KVPool, SlotSpan
from kvlinker.embedded.model.anatomy import LayerShape, trace_layers
from kvlinker.embedded.model.interception import ATTENTION_NAME, attention_of
from kvlinker.embedded.model.precision import in_fp32
from kvlinker.embedded.model.rotary import RotatedKeys
from kvlinker.errors import UnsupportedModelError
from kvlinker.linking.plan import Range
from kvlinker.store.chunk_kv import ChunkKV, changed

PROMPT_TOKENS = 96
SCATTERED = ((5, 6), (17, 40), (61, 62), (70, 96))
"""Ranges that the recomputation check overwrites with garbage; the last one ends the prompt."""

CHUNK = (23, 80)
"""The range that the placement checks treat as a chunk."""

TOLERANCE = 1e-4
"""Largest ‖ours − model's‖ / ‖model's‖ that passes, both computed in fp32."""


@dataclass(frozen=True, slots=True)
class Check:
    """One check's verdict; ``error`` is relative: ‖ours − expected‖ / ‖expected‖."""

    name: str
    meaning: str
    error: float

    @property
    def passed(self) -> bool:
        return self.error <= TOLERANCE  # false for NaN


def self_test(model: Any) -> tuple[Check, ...]:
    """Compare kvlinker's computation with the model's own forward pass on a fixed random prompt of 96 tokens.

    Rounding hides small mistakes, so both compute in fp32, whatever precision the weights are in.
    """
    with in_fp32(model):
        return _checks(_Subject(model))


def _checks(subject: _Subject) -> tuple[Check, ...]:
    tokens = subject.tokens
    expected = subject.own_logits()
    runner = subject.new_runner()
    capture = Capture(subject.layers, [CHUNK], dtype=torch.float32)

    whole = subject.computed(runner, [(0, len(tokens))], capture=capture)
    prefill = Check("prefill", "a prompt computed at once", _error(whole, expected))

    for begin, end in SCATTERED:
        _spoil(runner.pool, begin, end)
    again = subject.computed(runner, SCATTERED)
    recompute = Check("recompute", "scattered tokens computed again over garbage", _error(again, expected))

    begin, end = CHUNK
    linked = subject.computed(runner, [(0, begin), (end, len(tokens))], chunk=subject.shared(capture.finish()[0]))
    link = Check("link", "a chunk's stored KV attended to at its position", _error(linked, expected))

    rotaries = {layer.rotary for layer in subject.layers if layer.rotary is not None}
    relative = max(rotary.relative_error(PROMPT_TOKENS) for rotary in rotaries)
    moved = Check("relocate", "rotary embedding depends on distances alone", relative)
    return prefill, recompute, link, moved


def require_exact(model: Any) -> None:
    """Raises UnsupportedModelError, with the figures, unless all checks pass."""
    failed = [check for check in self_test(model) if not check.passed]
    if failed:
        figures = "; ".join(f"{check.name} ({check.meaning}): {check.error:.1e}" for check in failed)
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be linked exactly. Relative errors over {TOLERANCE:.0e}: "
            f"{figures}. Serve it without kvlinker, or report the model."
        )


class _Subject:
    """The model under test, with its layers and the prompt."""

    def __init__(self, model: Any) -> None:
        self._device: torch.device = next(model.parameters()).device
        self.layers: Sequence[LayerShape] = trace_layers(model)
        model.set_attn_implementation(ATTENTION_NAME)
        self._model = model
        vocabulary = model.config.get_text_config().vocab_size
        self.tokens: NDArray[np.int64] = np.random.default_rng(0).integers(0, vocabulary, PROMPT_TOKENS)

    def new_runner(self) -> Runner:
        pool = KVPool(self.layers, PROMPT_TOKENS, dtype=torch.float32, device=self._device)
        return Runner(self._model, self.layers, pool)

    def shared(self, kv: ChunkKV) -> SharedChunk:
        """Return CHUNK's KV as it is attended to in place."""
        form = RotatedKeys(tuple(shape.rotary for shape in self.layers))
        return SharedChunk(changed(kv, form.resident), CHUNK[0], CHUNK[0], 0, kv.tokens)

    def computed(
        self,
        runner: Runner,
        runs: Sequence[Range],
        *,
        chunk: SharedChunk | None = None,
        capture: Capture | None = None,
    ) -> Tensor:
        """Return the last logits when the ``runs`` are computed. Position p lies in slot p, but for tokens behind a
        shared chunk."""
        shared = () if chunk is None else (chunk,)
        own = np.concatenate([np.arange(*run) for run in runs]) if shared else np.arange(len(self.tokens))
        sight = Sight(shared, (SlotSpan(0, len(own)),), own, OwnTokens(own, shared))
        found = []
        for begin, end in runs:
            slots = np.searchsorted(own, np.arange(begin, end))
            wants_logits = end == len(self.tokens)
            found.append(Run(slots, begin, self.tokens[begin:end], wants_logits=wants_logits, capture=capture))
        batch = Batch(tuple(found), {None: sight})
        return runner.step(batch).logits[None]

    @torch.inference_mode()
    def own_logits(self) -> Tensor:
        """Return the last logits of the model's own forward pass, with transformers' plainest attention."""
        with attention_of(self._model, "eager"):
            output = self._model(input_ids=torch.from_numpy(self.tokens)[None].to(self._device), use_cache=False)
        logits: Tensor = output.logits[0, -1].float()
        return logits


def _spoil(pool: KVPool, begin: int, end: int) -> None:
    for tensor in (*pool.keys, *pool.values):
        tensor[:, begin:end] = 100.0


def _error(ours: Tensor, expected: Tensor) -> float:
    return float((ours.float() - expected.float()).norm() / expected.float().norm())
