"""Intercepts an unmodified transformers model where tokens see one another or their positions:
rotary embedding, attention, the expansion of latents, indexers, and the convolution and rule of
layers that keep a state. ``preparing.py`` steps into a model.

Functions are replaced once, process-wide, and an attention function is registered under
``ATTENTION_NAME``. They act only while an interceptor is active in the current context; models that
other code runs in the same process are not affected.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from inspect import signature
from types import ModuleType
from typing import Any, Protocol

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvlinker.engines.contract.rotary_forms import RotaryForm
from kvlinker.engines.embedded.model.indexers import IndexerCall
from kvlinker.engines.embedded.model.states.recurrence import ConvolutionCall
from kvlinker.engines.embedded.model.states.rules import RuleCall

ATTENTION_NAME = "kvlinker"

WINDOWS = "create_sliding_window_causal_mask"
"""The function that modeling modules have which make masks of windows. Some say the window to masks
alone, not to attention."""

MARK = "__kvlinker__"
"""The attribute of functions that were replaced."""


class Interceptor(Protocol):
    """Replaces rotary embedding, attention, indexers, convolutions and rules during one forward
    pass. What a class does not say rotates nothing, and refuses all else."""

    def rotary(self, form: RotaryForm, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Called when the model is about to rotate by the form's function; the model then gets what
        is returned, and for None, what would be rotated back unchanged."""
        return None

    def index(self, call: IndexerCall) -> Tensor:
        """Called when the model's indexer is about to pick tokens; the model goes on with what is
        returned, which its attention hands on, or makes a mask of."""
        raise LookupError("an indexer is called where none is expected")

    def attend(
        self,
        module: nn.Module | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: dict[str, Any],
    ) -> Tensor:
        """Compute attention over un-rotated [1, heads, tokens, head_dim]; returns [1, tokens,
        heads, head_dim]. ``module`` is None if the model writes attention out.

        Where attention expands latents, ``key`` is the part of the key that all heads share, and
        ``value`` the latent, of one head each.

        ``options`` are what the model hands to its attention function: scaling, sliding_window,
        softcap, s_aux, ….
        """
        raise LookupError("attention is called where none is expected")

    def convolve(self, call: ConvolutionCall) -> Tensor:
        """Called when the model is about to convolve; returns [1, channels, tokens], from which the
        model makes the arguments of the rule after it, if there is one."""
        raise LookupError("a convolution is called where none is expected")

    def recur(self, call: RuleCall) -> tuple[Tensor, Tensor | None]:
        """Apply the rule that follows a convolution; returns its output [1, tokens, heads, dim],
        and the last state [1, heads, rows, columns] if the model wants it."""
        raise LookupError("a rule is called where none is expected")


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


def replace(owner: ModuleType | type | nn.Module, name: str, instead: Callable[..., Any]) -> None:
    """Replace the owner's function of this name by ``instead`` while an interceptor is active: it
    is called with that, the function itself, and its arguments. Idempotent."""
    original = getattr(owner, name)
    if hasattr(original, MARK):
        return

    @wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        interceptor = _active.get()
        if interceptor is None:
            return original(*args, **kwargs)
        return instead(interceptor, original, *args, **kwargs)

    setattr(wrapped, MARK, True)
    setattr(owner, name, wrapped)


def replace_by_names(
    owner: ModuleType | type,
    name: str,
    instead: Callable[[Interceptor, Callable[..., Any], dict[str, Any]], Any],
) -> None:
    """Do what ``replace`` does, with the arguments by name in a dictionary; a method's ``self`` is
    one of them."""
    form = signature(getattr(owner, name))

    def named(
        interceptor: Interceptor, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        bound = form.bind(*args, **kwargs)
        bound.apply_defaults()
        given: dict[str, Any] = dict(bound.arguments)
        others: dict[str, Any] = given.pop("kwargs", {})
        return instead(interceptor, original, given | others)

    replace(owner, name, named)


def _window_of_masks(module: Any) -> int | None:
    """Return the window of an attention that does not say it itself."""
    if hasattr(module, "sliding_window"):  # where layers differ
        return module.sliding_window or None
    config = getattr(module, "config", None)
    if getattr(config, "layer_types", None) or not hasattr(
        sys.modules[type(module).__module__], WINDOWS
    ):
        return None
    return getattr(config, "sliding_window", None) or None


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
    if "sliding_window" not in options:
        options["sliding_window"] = _window_of_masks(module)
    return interceptor.attend(module, query, key, value, options), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _attention)


@contextmanager
def attention_of(model: Any, name: str) -> Iterator[None]:
    """Run ``model`` with the named attention function for a while."""
    before = model.config.get_text_config()._attn_implementation  # parts may keep another one
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
