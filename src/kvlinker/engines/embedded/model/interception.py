"""Steps into an unmodified transformers model at two places: rotary embedding and attention.

Every modeling module's ``apply_rotary_pos_emb(q, k, cos, sin, …)`` is wrapped once, process-wide,
and an attention function is registered under ``ATTENTION_NAME``. Both act only while an interceptor
is active in the current context; models that other code runs in the same process are not affected.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from inspect import Parameter, signature
from types import ModuleType
from typing import Any, Protocol

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

ATTENTION_NAME = "kvlinker"
ROTARY_FUNCTION = "apply_rotary_pos_emb"

RotaryFunction = Callable[..., tuple[Tensor, Tensor]]
"""Takes (query, key, cos, sin, …) and returns the first two with rotary embedding."""


class Interceptor(Protocol):
    """Replaces rotary embedding and attention during one forward pass."""

    def rotary(
        self, apply: RotaryFunction, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor
    ) -> None:
        """Called when the model is about to rotate; the model then gets ``query`` and ``key`` back
        unchanged."""
        ...

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]
    ) -> Tensor:
        """Compute attention over un-rotated [1, heads, tokens, head_dim]; returns [1, tokens,
        heads, head_dim].

        ``options`` are what the model hands to its attention function: scaling, sliding_window,
        softcap, s_aux, ….
        """
        ...


_active: ContextVar[Interceptor | None] = ContextVar("kvlinker_interceptor", default=None)


def active_interceptor() -> Interceptor | None:
    """Return the interceptor of the forward pass that this thread is in; None outside of one."""
    return _active.get()


@contextmanager
def intercepted(interceptor: Interceptor) -> Iterator[None]:
    """Route the rotary embedding and attention of this thread's forward passes to
    ``interceptor``."""
    token = _active.set(interceptor)
    try:
        yield
    finally:
        _active.reset(token)


def prepare(model: nn.Module) -> None:
    """Wrap the rotary functions of all modeling modules that ``model`` is made of. Idempotent.

    Functions of another form stay as they are.
    """
    for module in {sys.modules[type(part).__module__] for part in model.modules()}:
        if hasattr(module, ROTARY_FUNCTION):
            _wrap_rotary(module)


def _wrap_rotary(module: ModuleType) -> None:
    original: RotaryFunction = getattr(module, ROTARY_FUNCTION)
    if hasattr(original, "__kvlinker__") or not _has_known_form(original):
        return

    @wraps(original)
    def apply_rotary_pos_emb(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        interceptor = _active.get()
        if interceptor is None:
            return original(q, k, cos, sin, *args, **kwargs)
        interceptor.rotary(original, q, k, cos, sin)
        return q, k

    apply_rotary_pos_emb.__kvlinker__ = True  # type: ignore[attr-defined]
    setattr(module, ROTARY_FUNCTION, apply_rotary_pos_emb)


def _has_known_form(function: RotaryFunction) -> bool:
    """Tell if a function wants queries, keys, cos and sin, in this order."""
    wanted = [
        name
        for name, each in signature(function).parameters.items()
        if each.default is Parameter.empty
    ]
    return len(wanted) >= 4 and wanted[2:4] == ["cos", "sin"]


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    interceptor = _active.get()
    if interceptor is None:
        raise RuntimeError(f"attention {ATTENTION_NAME!r} was called outside kvlinker's engine")
    return interceptor.attend(module, query, key, value, options), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _attention)


@contextmanager
def attention_of(model: Any, name: str) -> Iterator[None]:
    """Run ``model`` with the named attention function for a while."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
