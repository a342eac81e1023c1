"""What a model computed for one prompt, from the inside: keys, values and attention of every layer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvlinker.embedded.engine import EmbeddedEngine
from kvlinker.embedded.model.anatomy import LayerShape
from kvlinker.embedded.model.interception import ATTENTION_NAME, attention_of
from kvlinker.embedded.model.loading import LoadedModel
from kvlinker.engine.attention import AttentionOptions, Queries, attention_weights
from kvlinker.engine.contract import GenerationRequest
from kvlinker.errors import InvalidRequestError
from kvlinker.linking import Policy, as_policy
from kvlinker.llm import LLM, Answer, Message
from kvlinker.prompt.segments import Prompt

LAST_QUERIES = 16
"""Fresh tokens at the prompt's end (the question's, and the template's behind it) whose attention is kept at most."""

IDLE_WITHIN = 5.0
"""Seconds."""

RECORDED_ATTENTION = "kvlinker-recorded"

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class LayerView:
    """One layer's keys (with rotary embedding) and values, [kv_heads, tokens, head_dim], and the attention of the
    prompt's last tokens on all, [heads, queries, tokens], fp32."""

    key: Tensor
    value: Tensor
    attention: Tensor


class Inspector(Protocol):
    """Runs one prompt under a policy while nothing else runs, and shows all layers."""

    def inspect(self, messages: Sequence[Message], policy: str | Policy) -> tuple[LayerView, ...]: ...

    def inspect_prompt(self, prompt: Prompt, policy: str | Policy) -> tuple[LayerView, ...]: ...


class EngineInspector:
    """``Inspector`` of the embedded engine: reads its KV pool, and records the queries that its model attends with."""

    def __init__(self, llm: LLM, loaded: LoadedModel) -> None:
        """``loaded`` is the model that ``llm`` runs. Raises InvalidRequestError for another kind of engine."""
        if not isinstance(llm.engine, EmbeddedEngine):
            raise InvalidRequestError("Deviations can only be measured with the embedded engine.")
        self._llm = llm
        self._loaded = loaded
        self._pool = llm.engine.runner.pool

    def inspect(self, messages: Sequence[Message], policy: str | Policy) -> tuple[LayerView, ...]:
        """A conversation; see ``inspect_prompt``."""
        return self.inspect_prompt(self._llm.chat_prompt(messages), policy)

    def inspect_prompt(self, prompt: Prompt, policy: str | Policy) -> tuple[LayerView, ...]:
        """Raises InvalidRequestError while the engine does something else: the prompt must lie at the pool's start."""
        request = GenerationRequest(prompt, as_policy(policy))
        return self._recording(prompt, lambda: self._llm.engine.explain(request).result())[1]

    def answer(self, messages: Sequence[Message], policy: str | Policy) -> tuple[Answer, tuple[LayerView, ...]]:
        """As ``inspect``, with the answer of one token that was inspected: its usage says what was recomputed."""

        def ask() -> Answer:
            return self._llm.chat_completion(messages, policy=policy, max_tokens=1, temperature=0)

        return self._recording(self._llm.chat_prompt(messages), ask)

    def _recording(self, prompt: Prompt, run: Callable[[], _T]) -> tuple[_T, tuple[LayerView, ...]]:
        self._wait_until_idle()
        fresh = len(prompt) - max([span.end for span in prompt.spans], default=0)
        with _recorded(self._loaded.model) as recorded:
            outcome = run()
        return outcome, tuple(
            self._view(index, len(prompt), query[:, -min(fresh, LAST_QUERIES) :], options)
            for index, (query, options) in sorted(recorded.items())
        )

    def _wait_until_idle(self) -> None:
        """A request's slots are freed shortly after its last event."""
        deadline = time.monotonic() + IDLE_WITHIN
        while self._llm.load().slots_used:
            if time.monotonic() > deadline:
                raise InvalidRequestError("Deviations can only be measured while no other request runs.")
            time.sleep(0.001)

    @torch.inference_mode()
    def _view(self, index: int, length: int, query: Tensor, options: AttentionOptions) -> LayerView:
        key = self._pool.keys[index][:, :length].clone()
        last = Queries(torch.arange(length - query.shape[1], length, device=query.device))
        attention = attention_weights(last, _rotated(self._loaded.layers[index], query, last), key, options)
        return LayerView(key, self._pool.values[index][:, :length].clone(), attention)


@contextmanager
def _recorded(model: Any) -> Iterator[dict[int, tuple[Tensor, AttentionOptions]]]:
    """By layer, the last un-rotated queries [heads, queries, head_dim] of the latest forward pass, and its options."""
    latest: dict[int, tuple[Tensor, AttentionOptions]] = {}

    def record(module: nn.Module, query: Tensor, *others: Any, **options: Any) -> tuple[Tensor, None]:
        scaling = options.get("scaling")
        latest[int(module.layer_idx)] = (  # type: ignore[arg-type]
            query[0, :, -LAST_QUERIES:].clone(),
            AttentionOptions(
                scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
                window=options.get("sliding_window"),
                softcap=options.get("softcap"),
                sinks=options.get("s_aux"),
            ),
        )
        attended: tuple[Tensor, None] = ALL_ATTENTION_FUNCTIONS[ATTENTION_NAME](module, query, *others, **options)
        return attended

    ALL_ATTENTION_FUNCTIONS.register(RECORDED_ATTENTION, record)
    with attention_of(model, RECORDED_ATTENTION):
        yield latest


def _rotated(layer: LayerShape, query: Tensor, queries: Queries) -> Tensor:
    """``query`` [heads, queries, key_dim] with the rotary embedding of its positions."""
    if layer.rotary is None:
        return query
    cos, sin = layer.rotary.tables(queries.last + 1)
    rotated = torch.empty_like(query, memory_format=torch.contiguous_format)
    layer.rotary.rotate(query, cos[queries.positions], sin[queries.positions], out=rotated)
    return rotated
