"""Is linking exact with this model? Checks that run when a model is loaded, and under ``kvlinker check``."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvlinker.engine.batch import Batch, Capture, Placed, Run
from kvlinker.engine.interception import attention_of
from kvlinker.engine.loading import LoadedModel
from kvlinker.engine.pool import KVPool
from kvlinker.engine.runner import Runner
from kvlinker.errors import UnsupportedModelError

PROMPT_TOKENS = 96
SCATTERED = ((5, 6), (17, 40), (61, 62), (70, 96))
"""Ranges that the recomputation check overwrites with garbage; the last one ends the prompt."""

CHUNK = (23, 80)
"""The range that the placement checks treat as a chunk."""

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest ‖ours − model's‖ / ‖model's‖ that passes."""


@dataclass(frozen=True, slots=True)
class Check:
    """One check's verdict; ``error`` is relative: ‖ours − expected‖ / ‖expected‖."""

    name: str
    meaning: str
    error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance  # false for NaN


def self_test(loaded: LoadedModel) -> tuple[Check, ...]:
    """Compare kvlinker's computation with the model's own forward pass on a fixed random prompt.

    Takes a few forward passes of 96 tokens.
    """
    tokens = _prompt(loaded)
    expected = _own_logits(loaded, tokens)
    tolerance = TOLERANCES[loaded.dtype]
    runner = _new_runner(loaded)
    capture = Capture(loaded.layers, first=CHUNK[0], tokens=CHUNK[1] - CHUNK[0], dtype=loaded.dtype)

    whole = runner.step(Batch((Run(0, 0, tokens, True, capture),)))[0]
    prefill = Check("prefill", "a prompt computed at once", _error(whole, expected), tolerance)

    for begin, end in SCATTERED:
        _spoil(runner.pool, begin, end)
    runs = tuple(Run(0, begin, tokens[begin:end], end == len(tokens)) for begin, end in SCATTERED)
    again = runner.step(Batch(runs))[0]
    recompute = Check("recompute", "scattered tokens computed again over garbage", _error(again, expected), tolerance)

    _spoil(runner.pool, *CHUNK)
    placed = Placed(capture.finish(), 0, CHUNK[1] - CHUNK[0], slot=CHUNK[0], rotary_start=CHUNK[0])
    last = Run(0, CHUNK[1], tokens[CHUNK[1] :], True)
    linked = runner.step(Batch((last,), (placed,)))[0]
    link = Check("link", "a chunk's stored KV placed back", _error(linked, expected), tolerance)

    relocate = Check(
        "relocate", "first-layer keys moved to another position", _relocation_error(loaded, tokens), tolerance
    )
    return prefill, recompute, link, relocate


def require_exact(loaded: LoadedModel) -> None:
    """Raises UnsupportedModelError, with the figures, unless all checks pass."""
    failed = [check for check in self_test(loaded) if not check.passed]
    if failed:
        figures = "; ".join(f"{check.name} ({check.meaning}): {check.error:.1e}" for check in failed)
        raise UnsupportedModelError(
            f"{type(loaded.model).__name__} cannot be linked exactly. Relative errors over {failed[0].tolerance:.0e}: "
            f"{figures}. Serve it without kvlinker, or report the model."
        )


def _prompt(loaded: LoadedModel) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    vocabulary = loaded.model.config.get_text_config().vocab_size
    return np.random.default_rng(0).integers(0, vocabulary, PROMPT_TOKENS)


def _new_runner(loaded: LoadedModel) -> Runner:
    pool = KVPool(loaded.layers, PROMPT_TOKENS, dtype=loaded.dtype, device=loaded.device)
    return Runner(loaded.model, loaded.layers, pool)


@torch.inference_mode()
def _own_logits(loaded: LoadedModel, tokens: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Tensor:
    """Last logits of the model's own forward pass, with transformers' plainest attention."""
    with attention_of(loaded.model, "eager"):
        output = loaded.model(input_ids=torch.from_numpy(tokens)[None].to(loaded.device), use_cache=False)
    logits: Tensor = output.logits[0, -1].float()
    return logits


def _relocation_error(loaded: LoadedModel, tokens: np.ndarray[tuple[int], np.dtype[np.int64]]) -> float:
    """A first-layer key depends on its token and position alone: stored anywhere, placed here, it must be the same."""
    begin, end = CHUNK
    layer = next(index for index, shape in enumerate(loaded.layers) if shape.rotary is not None)
    if layer != 0:
        return 0.0  # keys of deeper layers depend on what stands before them
    runner = _new_runner(loaded)
    capture = Capture(loaded.layers, first=0, tokens=end - begin, dtype=loaded.dtype)
    runner.step(Batch((Run(0, 0, tokens[begin:end], False, capture),)))
    runner.step(Batch((Run(0, 0, tokens),)))
    expected = runner.pool.keys[0][:, begin:end].clone()
    _spoil(runner.pool, begin, end)
    placed = Placed(capture.finish(), 0, end - begin, slot=begin, rotary_start=begin)
    runner.step(Batch((Run(0, end, tokens[end:]),), (placed,)))
    return _error(runner.pool.keys[0][:, begin:end], expected)


def _spoil(pool: KVPool, begin: int, end: int) -> None:
    for tensor in (*pool.keys, *pool.values):
        tensor[:, begin:end] = 100.0


def _error(ours: Tensor, expected: Tensor) -> float:
    return float((ours.float() - expected.float()).norm() / expected.float().norm())
