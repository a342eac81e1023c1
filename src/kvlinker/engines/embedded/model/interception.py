"""Intercepts an unmodified transformers model where tokens see one another or their positions:
rotary embedding, attention, the expansion of latents, indexers, and the convolution and rule of
layers that keep a state. Where attention is not called but written out, ``written_out.py`` follows
it.

Every modeling module's rotary functions, what changes states (``states/stepping.py``), and every
attention's ``expand_kv(latent, key)``, are wrapped once, process-wide, and an attention function is
registered under ``ATTENTION_NAME``. They act only while an interceptor is active in the current
context; models that other code runs in the same process are not affected.
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
from kvlinker.engines.embedded.model.indexers import IndexerCall, is_indexer
from kvlinker.engines.embedded.model.states.stepping import (
    MARK,
    StateInterceptor,
    replace,
    step_into_layers,
    step_into_module,
)
from kvlinker.engines.embedded.model.written_out import Followed

ATTENTION_NAME = "kvlinker"
ROTARY_FUNCTIONS = "apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave", "apply_rotary_emb"

EXPANSION = "expand_kv"
"""The method by which attention with latents makes keys and values of them."""


WINDOWS = "create_sliding_window_causal_mask"
"""The function that modeling modules have which make masks of windows. Some say the window to masks
alone, not to attention."""


class Interceptor(StateInterceptor, Protocol):
    """Replaces rotary embedding, attention and rules during one forward pass."""

    def rotary(self, form: RotaryForm, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Called when the model is about to rotate by the form's function; the model then gets what
        is returned, and for None, what would be rotated back unchanged."""
        ...

    def index(self, call: IndexerCall) -> Tensor:
        """Called when the model's indexer is about to pick tokens; the model goes on with what is
        returned, which its attention hands on, or makes a mask of."""
        ...

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
    """Wrap the rotary functions of all modeling modules that ``model`` is made of, their rules, and
    what expands latents. Idempotent.

    Functions of another form stay as they are.
    """
    kinds = {type(part) for part in model.modules()}
    for module in {sys.modules[kind.__module__] for kind in kinds}:
        for name in ROTARY_FUNCTIONS:
            if hasattr(module, name):
                _wrap_rotary(module, name)
        step_into_module(module, _active.get)
    for kind in kinds:
        if hasattr(kind, EXPANSION):
            _wrap_expansion(kind)
        if is_indexer(kind) and "hidden_states" in signature(kind.forward).parameters:
            _wrap_indexer(kind)
    step_into_layers(model, _active.get)


def cos_and_sin(tables: Any) -> tuple[Tensor, Tensor]:
    """Return cos and sin of what a rotary embedding's module makes: the two, or complex numbers."""
    if isinstance(tables, Tensor):
        return tables.real, tables.imag
    return tables[0], tables[1]


def _wrap_rotary(module: ModuleType, name: str) -> None:
    original = getattr(module, name)
    if hasattr(original, MARK):
        return
    form = RotaryForm.of(original)
    if form is None:
        return
    writes_out = not hasattr(module, "ALL_ATTENTION_FUNCTIONS")

    @wraps(original)
    def apply_rotary_pos_emb(*args: Any, **kwargs: Any) -> Any:
        interceptor = _active.get()
        if interceptor is None:
            return original(*args, **kwargs)
        rotated = interceptor.rotary(form, args, kwargs)
        if rotated is not None:
            return rotated
        unchanged = form.unchanged(args, kwargs)
        if not writes_out:
            return unchanged
        if isinstance(unchanged, Tensor):
            return unchanged.as_subclass(Followed)
        return tuple(each.as_subclass(Followed) for each in unchanged)

    replace(module, name, apply_rotary_pos_emb)


def _attend_written_out(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    interceptor = _active.get()
    assert interceptor is not None, "followed only while one is active"
    return interceptor.attend(None, query, key, value, {"scaling": scale}).transpose(1, 2)


Followed.attend = staticmethod(_attend_written_out)


def _wrap_expansion(kind: type[nn.Module]) -> None:
    """Have attention hand on the latent, and the key that all heads share, as they are."""
    original = getattr(kind, EXPANSION)
    if hasattr(original, MARK):
        return

    @wraps(original)
    def expand_kv(module: nn.Module, latent: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        if _active.get() is None:
            expanded: tuple[Tensor, Tensor] = original(module, latent, key)
            return expanded
        return key, latent

    replace(kind, EXPANSION, expand_kv)


def _wrap_indexer(kind: type[nn.Module]) -> None:
    original: Callable[..., Tensor] = kind.forward
    if hasattr(original, MARK):
        return
    form = signature(original)

    @wraps(original)
    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        interceptor = _active.get()
        if interceptor is None:
            return original(module, *args, **kwargs)
        bound = form.bind(module, *args, **kwargs).arguments
        _, *names = form.parameters
        arguments = {name: bound.get(name) for name in names}
        return interceptor.index(IndexerCall(module, original, arguments))

    replace(kind, "forward", forward)


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
