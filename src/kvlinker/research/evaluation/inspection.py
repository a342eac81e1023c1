"""Looks into a model: every layer's keys, values and attention for a prompt, and their deviation from full prefill.

Deviations follow CacheBlend (section 4.1).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
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
from kvlinker.research.evaluation.examples import Deviation

LAST_QUERIES = 16
"""Fresh tokens at the prompt's end (the question's, and the template's behind it) whose attention is kept at most."""

IDLE_WITHIN = 5.0
"""Seconds in which the engine has to become idle."""

RECORDED_ATTENTION = "kvlinker-recorded"

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class LayerView:
    """Holds what one layer computed for a prompt."""

    key: Tensor
    """Keys with their rotary embedding, [kv_heads, tokens, head_dim]."""
    value: Tensor
    """Values, [kv_heads, tokens, head_dim]."""
    attention: Tensor
    """The attention of the prompt's last tokens on all tokens, [heads, queries, tokens], fp32."""


class Inspector(Protocol):
    """Runs one prompt under a policy while nothing else runs, and shows all layers."""

    def inspect(self, messages: Sequence[Message], policy: str | Policy) -> tuple[LayerView, ...]:
        """Show the layers of a conversation."""
        ...

    def inspect_prompt(self, prompt: Prompt, policy: str | Policy) -> tuple[LayerView, ...]:
        """Show the layers of a prompt."""
        ...


class EngineInspector:
    """Inspects the embedded engine: reads its KV pool, and records the queries that its model attends with."""

    def __init__(self, llm: LLM, loaded: LoadedModel) -> None:
        """Inspect ``llm``, which runs the model ``loaded``. Raises InvalidRequestError for another kind of engine."""
        if not isinstance(llm.engine, EmbeddedEngine):
            raise InvalidRequestError("Deviations can only be measured with the embedded engine.")
        self._llm = llm
        self._loaded = loaded
        self._pool = llm.engine.runner.pool

    def inspect(self, messages: Sequence[Message], policy: str | Policy) -> tuple[LayerView, ...]:
        """Show the layers of a conversation; see ``inspect_prompt``."""
        return self.inspect_prompt(self._llm.chat_prompt(messages), policy)

    def inspect_prompt(self, prompt: Prompt, policy: str | Policy) -> tuple[LayerView, ...]:
        """Show the layers of a prompt.

        Raises InvalidRequestError while the engine does something else: the prompt must lie at the pool's start.
        """
        request = GenerationRequest(prompt, as_policy(policy))
        return self._recording(prompt, lambda: self._llm.engine.explain(request).result())[1]

    def answer(self, messages: Sequence[Message], policy: str | Policy) -> tuple[Answer, tuple[LayerView, ...]]:
        """Inspect a conversation, and return the answer of one token too: its usage says what was recomputed."""

        def ask() -> Answer:
            return self._llm.chat_completion(messages, policy=policy, max_tokens=1, temperature=0)

        return self._recording(self._llm.chat_prompt(messages), ask)

    def _recording(self, prompt: Prompt, run: Callable[[], _T]) -> tuple[_T, tuple[LayerView, ...]]:
        self._wait_until_idle()
        fresh = len(prompt) - max([span.end for span in prompt.spans], default=0)
        with _recorded(self._loaded.model) as recorded:
            returned = run()
        return returned, tuple(
            self._view(index, len(prompt), query[:, -min(fresh, LAST_QUERIES) :], options)
            for index, (query, options) in sorted(recorded.items())
        )

    def _wait_until_idle(self) -> None:
        """Wait until no request holds slots, which are freed shortly after a request's last event."""
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
    """Record, by layer, the last un-rotated queries [heads, queries, head_dim] of the latest forward pass, and the
    options of its attention."""
    latest: dict[int, tuple[Tensor, AttentionOptions]] = {}

    def record(module: nn.Module, query: Tensor, *others: Any, **options: Any) -> tuple[Tensor, None]:
        latest[int(module.layer_idx)] = (  # type: ignore[arg-type]
            query[0, :, -LAST_QUERIES:].clone(),
            AttentionOptions.of_call(query, options),
        )
        attended: tuple[Tensor, None] = ALL_ATTENTION_FUNCTIONS[ATTENTION_NAME](module, query, *others, **options)
        return attended

    ALL_ATTENTION_FUNCTIONS.register(RECORDED_ATTENTION, record)
    with attention_of(model, RECORDED_ATTENTION):
        yield latest


def _rotated(layer: LayerShape, query: Tensor, queries: Queries) -> Tensor:
    """Return ``query`` [heads, queries, key_dim] with the rotary embedding of its positions."""
    if layer.rotary is None:
        return query
    cos, sin = layer.rotary.tables(queries.last + 1)
    rotated = torch.empty_like(query, memory_format=torch.contiguous_format)
    layer.rotary.rotate(query, cos[queries.positions], sin[queries.positions], out=rotated)
    return rotated


def deviation(full: Sequence[LayerView], other: Sequence[LayerView], cached: NDArray[np.bool_]) -> Deviation:
    """Measure how far a prompt under a policy is from the same under ``full``.

    ``cached`` [tokens] marks the tokens that a chunk cache holds.
    """
    held = np.flatnonzero(cached)
    relative = relative_kv_distance(full, other)[:, held]
    return Deviation(kv=tuple(relative.mean(axis=1).tolist()), attention=attention_deviation(full, other))


def relative_kv_distance(full: Sequence[LayerView], other: Sequence[LayerView]) -> NDArray[np.float32]:
    """Return ‖KV − KV_full‖ / ‖KV_full‖ of every token in every layer, [layers, tokens]."""
    norms = np.stack([_norms(view.key.float(), view.value.float()) for view in full])
    return kv_distance(full, other) / norms


def kv_distance(full: Sequence[LayerView], other: Sequence[LayerView]) -> NDArray[np.float32]:
    """Return ‖KV − KV_full‖ of every token in every layer, [layers, tokens]: L2 over keys and values of all heads.

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

    A step may end with fewer tokens than are kept; then only the tokens that both have are compared.
    """
    distances = []
    for reference, view in zip(full, other, strict=True):
        queries = min(reference.attention.shape[1], view.attention.shape[1])
        difference = view.attention[:, -queries:] - reference.attention[:, -queries:]
        distances.append(float(difference.norm(dim=-1).mean()))
    return tuple(distances)


def _norms(key: Tensor, value: Tensor) -> NDArray[np.float32]:
    """Return the L2 norm of every token over key and value, both [kv_heads, tokens, head_dim]: [tokens]."""
    squares = key.square().sum(dim=(0, 2)) + value.square().sum(dim=(0, 2))
    norms: NDArray[np.float32] = squares.sqrt().cpu().numpy()
    return norms
