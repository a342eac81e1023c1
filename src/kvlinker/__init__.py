"""A linker for KV caches.

What users import from here is loaded when it is first asked for, so that a client needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvlinker.async_llm import AsyncLLM
    from kvlinker.client import AsyncClient, Client
    from kvlinker.errors import KVLinkerError
    from kvlinker.llm import LLM
    from kvlinker.types.context_cache import ContextCache
    from kvlinker.types.grammars import AnswerGrammar
    from kvlinker.types.sampling import SamplingParams

__all__ = [
    "LLM",
    "AnswerGrammar",
    "AsyncClient",
    "AsyncLLM",
    "Client",
    "ContextCache",
    "KVLinkerError",
    "SamplingParams",
]

_HOMES = {
    "LLM": "kvlinker.llm",
    "AnswerGrammar": "kvlinker.types.grammars",
    "AsyncClient": "kvlinker.client",
    "AsyncLLM": "kvlinker.async_llm",
    "Client": "kvlinker.client",
    "ContextCache": "kvlinker.types.context_cache",
    "KVLinkerError": "kvlinker.errors",
    "SamplingParams": "kvlinker.types.sampling",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
