"""Checks that linking is exact with a model. The checks run when it is loaded, and under ``kvlinker
check``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvlinker.base.errors import UnsupportedModelError
from kvlinker.base.loading import Report, unreported
from kvlinker.base.threads import serially
from kvlinker.engines.contract.selftest import (
    CHUNK,
    GARBAGE,
    PROMPT_TOKENS,
    SCATTERED,
    TOLERANCE,
    SelfTestCheck,
)
from kvlinker.engines.embedded.execution.batch import (
    Batch,
    OwnTokens,
    Run,
    SharedChunk,
    VisibleKV,
)
from kvlinker.engines.embedded.execution.capturing import Capture
from kvlinker.engines.embedded.execution.runner import Runner
from kvlinker.engines.embedded.kv_cache.pool import KVPool, SlotSpan
from kvlinker.engines.embedded.kv_cache.states import SequenceState
from kvlinker.engines.embedded.model.anatomy import keeping
from kvlinker.engines.embedded.model.bounds import context_window
from kvlinker.engines.embedded.model.discovery import anatomy_of
from kvlinker.engines.embedded.model.indexers import picking_by
from kvlinker.engines.embedded.model.interception import ATTENTION_NAME
from kvlinker.engines.embedded.model.loaded import RotatedKeys
from kvlinker.engines.embedded.model.obstacles import (
    EXHAUSTED,
    Obstacle,
    depends_on_place,
    obstacle_of,
    refusal,
)
from kvlinker.engines.embedded.model.oracles.frozen import FrozenOracle
from kvlinker.engines.embedded.model.oracles.masked import Oracle
from kvlinker.engines.embedded.model.oracles.referee import Referee
from kvlinker.engines.embedded.model.precision import in_fp32
from kvlinker.engines.embedded.model.preparing import prepare
from kvlinker.prompting.segments import Range, ranges
from kvlinker.store.chunk_kv import ChunkKV, changed

CHUNKS = ((23, 40), (40, 61), (66, 80))
"""The ranges that are computed alone, and linked."""

FIRST_TOKENS = 8
"""The first tokens of a chunk that layers with a state keep one by one here."""

AGAIN = {
    "starts": [position for begin, _ in CHUNKS for position in range(begin, begin + 4)],
    "scattered": [24, 33, 34, 39, 52, 66, 73, 79],
}
"""Tokens of chunks that are computed again, where layers keep a state."""

SMALL_MODEL = 1 << 24
"""The most weights of a model whose passes are too short to be divided among threads."""

USUAL_CHECKS = 6
"""The checks of most models."""

BEHIND = PROMPT_TOKENS - CHUNK[1]
"""The tokens after the chunks, whose logits are compared."""

OF_PLACE = ("relocate", "move", "far")
"""The checks that fail where a model computes something else further on in a text."""

ANGLE_ROUNDING = 2.0**-23
"""The error of the difference of two angles in fp32, in radians for each position of their distance
from the start."""


def self_test(model: Any, report: Report = unreported) -> tuple[SelfTestCheck, ...]:
    """Compare kvlinker's computation with the model's own forward pass on a fixed random prompt of
    96 tokens.

    Rounding hides small mistakes, so both compute in fp32, whatever precision the weights are in.
    Small models are computed by one thread. ``report`` takes the progress.
    Checks end where the first one fails, since the others need what it shows. Raises
    UnsupportedModelError for a model that kvlinker cannot compute at all.
    """
    prepare(model)
    is_small = sum(each.numel() for each in model.parameters()) <= SMALL_MODEL
    with in_fp32(model), serially() if is_small else nullcontext():
        subject = _Subject(model)
        try:
            checks = []
            for check in _checks(subject):
                checks.append(check)
                report("checking", min(len(checks) / USUAL_CHECKS, 1.0))
                if not check.passed:
                    break
        except EXHAUSTED:
            raise
        except Exception as error:  # whatever the model's code raises
            raise refusal(model, obstacle_of(model, Obstacle.ATTENTION_FORM)) from error
    return tuple(checks)


def refusal_after(model: Any, checks: Sequence[SelfTestCheck]) -> UnsupportedModelError | None:
    """Return the error, with the figures, that refuses a model after these checks; None if all
    passed."""
    failed = checks[-1]
    if failed.passed:
        return None
    return refusal(
        model,
        Obstacle.PLACE if failed.name in OF_PLACE else _reason(model),
        f"The check {failed.name} ({failed.meaning}) has a relative error of {failed.error:.1e}; "
        f"{failed.allowed:.0e} is allowed.",
    )


def _reason(model: Any) -> Obstacle:
    """Return why a model does not compute what it computes linked."""
    found = obstacle_of(model, Obstacle.INEXACT)
    if found is not Obstacle.INEXACT:
        return found
    with in_fp32(model):
        return Obstacle.PLACE if depends_on_place(model) else found


def require_exact(model: Any, report: Report = unreported) -> None:
    """Raises UnsupportedModelError unless all checks pass."""
    error = refusal_after(model, self_test(model, report))
    if error is not None:
        raise error


def _checks(subject: _Subject) -> Iterator[SelfTestCheck]:
    tokens = subject.tokens
    oracle = subject.oracle()
    expected = oracle.logits
    runner = subject.new_runner()
    capture = subject.capture([CHUNK])

    whole = subject.computed(runner, [(0, len(tokens))], capture=capture)
    yield SelfTestCheck("prefill", "a prompt computed at once", _error(whole, expected))

    if subject.anatomy.recurrences:
        yield SelfTestCheck(
            "steps",
            "a prompt computed in steps, states handed on",
            _error(subject.computed_in_steps(runner, (37, 40, PROMPT_TOKENS)), expected),
        )
    else:
        for begin, end in SCATTERED:
            _spoil(runner.pool, begin, end)
        again = subject.computed(runner, SCATTERED)
        yield SelfTestCheck(
            "recompute", "scattered tokens computed again over garbage", _error(again, expected)
        )

    (chunk,) = capture.finish()
    linked = subject.linked(runner, {CHUNK: chunk})
    yield SelfTestCheck(
        "link", "a chunk's stored KV attended to at its position", _error(linked, expected)
    )
    if subject.anatomy.picks:
        meaning = "the scores by which indexers pick tokens"
        yield SelfTestCheck("pick", meaning, subject.referee.error)

    rotaries = {layer.rotary for layer in subject.anatomy.layers if layer.rotary is not None}
    errors = [rotary.relative_error(subject.window) for rotary in rotaries]
    relative = float(np.max(errors, initial=0.0))
    rounding = subject.window * ANGLE_ROUNDING
    meaning = f"rotary embedding depends on distances alone, over {subject.window:,} positions"
    yield SelfTestCheck("relocate", meaning, relative, TOLERANCE + rounding)

    further = max(subject.window - len(tokens), 0)
    moved = oracle.linked_logits(CHUNKS, moved=further)
    alone = subject.alone(runner)
    linked = subject.linked(runner, alone)
    there = _error(linked, moved)
    here = there if there <= TOLERANCE else _error(linked, oracle.linked_logits(CHUNKS))
    yield SelfTestCheck(
        "move", f"{len(CHUNKS)} chunks computed alone, attended to where they stand", here
    )
    yield SelfTestCheck("far", f"the same, {further:,} positions further on", there)
    if isinstance(oracle, FrozenOracle):
        for name, positions in AGAIN.items():
            expected = oracle.linked_logits(CHUNKS, again=positions)
            error = _error(subject.linked(runner, alone, again=positions), expected)
            yield SelfTestCheck(name, f"the same, with {name} of chunks computed again", error)
    if subject.anatomy.picks:
        yield SelfTestCheck("pick linked", f"{meaning}, of what is linked", subject.referee.error)


class _Subject:
    """The model under test, with its layers and the prompt."""

    def __init__(self, model: Any) -> None:
        self._device: torch.device = next(model.parameters()).device
        self.anatomy = anatomy_of(model)
        model.set_attn_implementation(ATTENTION_NAME)
        self._model = model
        self.referee = Referee()
        self.window = context_window(model)
        vocabulary = model.config.get_text_config().vocab_size
        self.tokens: NDArray[np.int64] = np.random.default_rng(0).integers(
            0, vocabulary, PROMPT_TOKENS
        )

    def oracle(self) -> Oracle | FrozenOracle:
        if self.anatomy.recurrences or self.anatomy.picks:
            return FrozenOracle(self._model, self.tokens, BEHIND, self.referee)
        return Oracle(self._model, self.tokens, BEHIND)

    def capture(self, spans: Sequence[Range]) -> Capture:
        return Capture(self.anatomy, spans, dtype=torch.float32, first_tokens=FIRST_TOKENS)

    def new_runner(self) -> Runner:
        pool = KVPool(self.anatomy.layers, PROMPT_TOKENS, dtype=torch.float32, device=self._device)
        return Runner(self._model, self.anatomy, pool)

    def alone(self, runner: Runner) -> dict[Range, ChunkKV]:
        """Return the KV of CHUNKS, each computed from position 0 on."""
        captures: dict[Range, Capture] = {}
        visible_kv: dict[object, VisibleKV] = {}
        runs = []
        for chunk in CHUNKS:
            begin, end = chunk
            own = np.arange(end - begin)
            captures[chunk] = self.capture([(0, len(own))])
            visible_kv[chunk] = VisibleKV((), (SlotSpan(begin, len(own)),), own, OwnTokens(own, ()))
            runs.append(
                Run(own + begin, 0, self.tokens[begin:end], capture=captures[chunk], owner=chunk)
            )
        with picking_by(self.referee):
            runner.step(Batch(tuple(runs), visible_kv))
        return {chunk: capture.finish()[0] for chunk, capture in captures.items()}

    def computed_in_steps(self, runner: Runner, ends: Sequence[int]) -> Tensor:
        """Return the logits [wanted, vocabulary] of the last tokens of the prompt, of which one
        step computes the tokens up to each of ``ends``."""
        own, begin = np.arange(PROMPT_TOKENS), 0
        visible = VisibleKV((), (), own, OwnTokens(own, ()))
        for end in ends:
            visible = replace(
                visible, spans=(SlotSpan(0, end),), positions=own[:end], own=OwnTokens(own, ())
            )
            batch = Batch(
                (Run(own[begin:end], begin, self.tokens[begin:end], True),), {None: visible}
            )
            logits, states = self._step(runner, batch)
            visible, begin = replace(visible, state=states[None][-1]), end
        return logits

    def linked(
        self, runner: Runner, chunks: Mapping[Range, ChunkKV], *, again: Sequence[int] = ()
    ) -> Tensor:
        """Return the logits [BEHIND, vocabulary] after the chunks, whose KV is attended to in
        place. The positions ``again`` are computed."""
        form = RotatedKeys(keeping(self.anatomy.layers))
        shared = tuple(
            SharedChunk(changed(kv, form.resident), begin, begin, 0, kv.tokens)
            for (begin, _), kv in chunks.items()
        )
        computed = np.ones(PROMPT_TOKENS - BEHIND, dtype=np.bool_)
        for begin, end in chunks:
            computed[begin:end] = False
        computed[list(again)] = True
        behind = [
            (position, position + 1) for position in range(PROMPT_TOKENS - BEHIND, PROMPT_TOKENS)
        ]
        return self.computed(runner, [*ranges(computed), *behind], shared=shared)

    def computed(
        self,
        runner: Runner,
        runs: Sequence[Range],
        *,
        shared: tuple[SharedChunk, ...] = (),
        capture: Capture | None = None,
    ) -> Tensor:
        """Return the logits [wanted, vocabulary] of the last tokens of ``runs`` that end after the
        chunks, when all are computed. Position p lies in slot p, except after a shared chunk."""
        own = (
            np.concatenate([np.arange(*run) for run in runs])
            if shared
            else np.arange(len(self.tokens))
        )
        visible = VisibleKV(shared, (SlotSpan(0, len(own)),), own, OwnTokens(own, shared))
        found = []
        for begin, end in runs:
            slots = np.searchsorted(own, np.arange(begin, end))
            wants_logits = end > PROMPT_TOKENS - BEHIND
            found.append(Run(slots, begin, self.tokens[begin:end], wants_logits, capture))
        return self._step(runner, Batch(tuple(found), {None: visible}))[0]

    def _step(
        self, runner: Runner, batch: Batch
    ) -> tuple[Tensor, Mapping[object, tuple[SequenceState, ...]]]:
        """Return the logits [wanted, vocabulary] of a step, and the states after it."""
        seen: list[Tensor] = []
        handle = self._model.register_forward_hook(
            lambda model, args, output: seen.append(output.logits[0].float())
        )
        try:
            with picking_by(self.referee):
                states = runner.step(batch).states
        finally:
            handle.remove()
        return seen[0] if runner.picks_logits else seen[0][batch.logit_rows], states


def _spoil(pool: KVPool, begin: int, end: int) -> None:
    for layer in pool.layers:
        for part in layer.parts:
            part[:, begin:end] = GARBAGE


def _error(ours: Tensor, expected: Tensor) -> float:
    """Return the relative error of our logits [wanted, vocabulary] from the last rows of those that
    are expected."""
    expected = expected[-len(ours) :]
    return float((ours - expected).norm() / expected.norm())
