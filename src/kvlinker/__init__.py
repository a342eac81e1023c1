"""A linker for KV caches.

What users import from here is loaded when it is first asked for, so that a client needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvlinker.async_llm import AsyncLLM
    from kvlinker.base.errors import KVLinkerError
    from kvlinker.base.types.chunks import ContextCache
    from kvlinker.base.types.grammars import AnswerGrammar
    from kvlinker.base.types.sampling import SamplingParams
    from kvlinker.doors.client import AsyncClient, Client, Workflow
    from kvlinker.llm import LLM

__all__ = [
    "LLM",
    "AnswerGrammar",
    "AsyncClient",
    "AsyncLLM",
    "Client",
    "ContextCache",
    "KVLinkerError",
    "SamplingParams",
    "Workflow",
]

_HOMES = {
    "LLM": "kvlinker.llm",
    "AnswerGrammar": "kvlinker.base.types.grammars",
    "AsyncClient": "kvlinker.doors.client",
    "AsyncLLM": "kvlinker.async_llm",
    "Client": "kvlinker.doors.client",
    "ContextCache": "kvlinker.base.types.chunks",
    "KVLinkerError": "kvlinker.base.errors",
    "SamplingParams": "kvlinker.base.types.sampling",
    "Workflow": "kvlinker.doors.client",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
