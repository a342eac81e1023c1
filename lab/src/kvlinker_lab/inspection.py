"""Looks into a model: every layer's keys, values and attention for a prompt, and their deviation
from full prefill.

Deviations follow CacheBlend (section 4.1).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvlinker.base.errors import InvalidRequestError
from kvlinker.engines.contract.attention import AttentionOptions
from kvlinker.engines.contract.contract import GenerationRequest
from kvlinker.engines.embedded.attention.kernel import (
    AttentionKernel,
    AttentionPlan,
    KeyValue,
    Segments,
    View,
)
from kvlinker.engines.embedded.attention.position_scores import PositionScores
from kvlinker.engines.embedded.engine import EmbeddedEngine
from kvlinker.engines.embedded.model.loaded import LoadedModel
from kvlinker.engines.embedded.model.rotary import Rotary
from kvlinker.linking import Policy, as_policy
from kvlinker.llm import LLM, Answer, Message
from kvlinker.prompting.segments import Prompt

LAST_QUERIES = 16
"""Fresh tokens at the prompt's end (the question's, and the template's behind it) whose attention
is kept at most."""

IDLE_WITHIN = 5.0
"""Seconds in which the engine has to become idle."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class LayerView:
    """The computation of one layer for a prompt."""

    key: Tensor
    """Keys with their rotary embedding, [kv_heads, tokens, head_dim]."""
    value: Tensor
    """Values, [kv_heads, tokens, head_dim]."""
    attention: Tensor
    """The attention of the prompt's last tokens on all tokens, [heads, queries, tokens], fp32."""


class EngineInspector:
    """Inspects the embedded engine: looks over the shoulder of its attention kernel."""

    def __init__(self, llm: LLM, loaded: LoadedModel) -> None:
        """Inspect ``llm``, which runs the model ``loaded``. Raises InvalidRequestError for another
        kind of engine."""
        if not isinstance(llm.engine, EmbeddedEngine):
            raise InvalidRequestError("Deviations can only be measured with the embedded engine.")
        self._llm = llm
        self._layers = len(loaded.layers)
        self._runner = llm.engine.runner

    def inspect(self, messages: Sequence[Message], policy: str | Policy) -> tuple[LayerView, ...]:
        """Show the layers of a conversation; see ``inspect_prompt``."""
        return self.inspect_prompt(self._llm.chat_prompt(messages), policy)

    def inspect_prompt(self, prompt: Prompt, policy: str | Policy) -> tuple[LayerView, ...]:
        """Show the layers of a prompt.

        Raises InvalidRequestError while the engine does something else.
        """
        request = GenerationRequest(prompt, as_policy(policy))
        return self._recording(prompt, lambda: self._llm.engine.explain(request).result())[1]

    def answer(
        self, messages: Sequence[Message], policy: str | Policy
    ) -> tuple[Answer, tuple[LayerView, ...]]:
        """Inspect a conversation, and return an answer of one token too, whose usage counts the
        recomputed tokens."""

        def ask() -> Answer:
            return self._llm.chat_completion(messages, policy=policy, max_tokens=1, temperature=0)

        return self._recording(self._llm.chat_prompt(messages), ask)

    def _recording(self, prompt: Prompt, run: Callable[[], _T]) -> tuple[_T, tuple[LayerView, ...]]:
        self._wait_until_idle()
        fresh = len(prompt) - max([span.end for span in prompt.spans], default=0)
        recording = _RecordingKernel(
            self._runner.kernel, self._layers, len(prompt), min(fresh, LAST_QUERIES)
        )
        self._runner.kernel = recording
        try:
            returned = run()
        finally:
            self._runner.kernel = recording.inner
        return returned, tuple(view for _, view in sorted(recording.views.items()))

    def _wait_until_idle(self) -> None:
        """Wait until no request holds slots, which are freed shortly after a request's last
        event."""
        deadline = time.monotonic() + IDLE_WITHIN
        while self._llm.current_load().slots_used:
            if time.monotonic() > deadline:
                raise InvalidRequestError(
                    "Deviations can only be measured while no other request runs."
                )
            time.sleep(0.001)


class _RecordingKernel:
    """An ``AttentionKernel`` that records every layer of the step which computes a prompt's last
    token."""

    def __init__(self, inner: AttentionKernel, layers: int, length: int, queries: int) -> None:
        """Record the prompt of ``length`` tokens, and the attention of its last ``queries``."""
        self.inner = inner
        self.views: dict[int, LayerView] = {}
        self._layers, self._length, self._queries = layers, length, queries
        self._calls = 0

    def plan(self, views: Sequence[View], positions: NDArray[np.int64]) -> AttentionPlan:
        return self.inner.plan(views, positions)

    def write(
        self,
        plan: AttentionPlan,
        key: Tensor,
        value: Tensor,
        slots: Tensor,
        rotary: Rotary | None,
        into: KeyValue,
    ) -> None:
        self.inner.write(plan, key, value, slots, rotary, into)

    def attend(
        self,
        plan: AttentionPlan,
        query: Tensor,
        segments: Segments,
        rotary: Rotary | None,
        options: AttentionOptions,
        *,
        output: Tensor,
    ) -> None:
        self.inner.attend(plan, query, segments, rotary, options, output=output)
        layer, self._calls = self._calls % self._layers, self._calls + 1
        if int(plan.positions[-1]) == self._length - 1:
            last = slice(max(0, len(plan.positions) - self._queries), None)
            positions, mine = plan.positions[last], query[:, last]
            scores = PositionScores(
                plan.views, positions, rotary, options.window, self._length, device=query.device
            )
            attention = scores.weights(mine, segments, options)
            self.views[layer] = LayerView(
                *_in_order(plan.views, segments, rotary, self._length), attention
            )


def _in_order(
    views: Sequence[View], segments: Segments, rotary: Rotary | None, length: int
) -> tuple[Tensor, Tensor]:
    """Return the keys, with the rotary embedding of their positions, and values that are seen:
    [kv_heads, length, head_dim] each."""
    key, value = (
        part.new_zeros(len(part), length, part.shape[2]) for part in segments[views[0].segment]
    )
    for view in views:
        seen = np.arange(view.first, view.last)
        if view.hidden is not None:
            seen = seen[~view.hidden[view.first : view.last]]
        at = torch.from_numpy(seen + view.start if view.positions is None else view.positions[seen])
        found, values = (part[:, torch.from_numpy(seen)] for part in segments[view.segment])
        key[:, at] = found if rotary is None else rotary.shifted(found, view.rotary_start)
        value[:, at] = values
    return key, value


def relative_kv_distance(
    full: Sequence[LayerView], other: Sequence[LayerView]
) -> NDArray[np.float32]:
    """Return ‖KV − KV_full‖ / ‖KV_full‖ of every token in every layer, [layers, tokens]."""
    norms = np.stack([_norms(view.key.float(), view.value.float()) for view in full])
    return kv_distance(full, other) / norms


def kv_distance(full: Sequence[LayerView], other: Sequence[LayerView]) -> NDArray[np.float32]:
    """Return ‖KV − KV_full‖ of every token in every layer, [layers, tokens]: L2 over keys and
    values of all heads.

    It is the paper's KV deviation (table 1), which it calls an absolute difference.
    """
    return np.stack(
        [
            _norms(view.key.float() - reference.key, view.value.float() - reference.value)
            for reference, view in zip(full, other, strict=True)
        ]
    )


def attention_deviation(full: Sequence[LayerView], other: Sequence[LayerView]) -> tuple[float, ...]:
    """Return, by layer, ‖A − A_full‖ of the last tokens' attention, the mean over heads and tokens.

    A step may end with fewer tokens than are kept; then only the tokens that both have are
    compared.
    """
    distances = []
    for reference, view in zip(full, other, strict=True):
        queries = min(reference.attention.shape[1], view.attention.shape[1])
        difference = view.attention[:, -queries:] - reference.attention[:, -queries:]
        distances.append(float(difference.norm(dim=-1).mean()))
    return tuple(distances)


def _norms(key: Tensor, value: Tensor) -> NDArray[np.float32]:
    """Return the L2 norm of every token over key and value, both [kv_heads, tokens, head_dim]:
    [tokens]."""
    squares = key.square().sum(dim=(0, 2)) + value.square().sum(dim=(0, 2))
    norms: NDArray[np.float32] = squares.sqrt().cpu().numpy()
    return norms
