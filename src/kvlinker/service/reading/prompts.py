"""A prompt that was read, the request's options for reading it, and their defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvlinker.base.types.context_cache import LinkedCache
from kvlinker.base.types.messages import Implicit
from kvlinker.linking import Policy
from kvlinker.prompting.segments import Prompt
from kvlinker.service.implicit.caches import FoundChunk


@dataclass(frozen=True, slots=True)
class ReadPrompt:
    """Holds a prompt, how it is to be linked, and the context caches that stand in it."""

    prompt: Prompt

    policy: Policy
    """The policy that the request asks for, or that applies to a prompt with these chunks."""

    caches: Mapping[str, FoundChunk]
    """By id, in the order in which the prompt first has them."""

    salt: str = ""
    """The request's own salt."""

    @property
    def linked(self) -> tuple[LinkedCache, ...]:
        """The context caches, as answers list them."""
        return tuple(
            LinkedCache(id, len(each.chunk), each.created) for id, each in self.caches.items()
        )

    @property
    def implicit(self) -> bool:
        """True if there are context caches, and none of them was named by id."""
        return bool(self.caches) and all(
            each.cache.implicit_ttl is not None for each in self.caches.values()
        )

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of their chunks."""
        return tuple(each.cache.chunk_key for each in self.caches.values())

    @property
    def ids(self) -> dict[str, str]:
        """The ids of the context caches, by their chunks' content."""
        return {each.chunk.content: id for id, each in self.caches.items()}


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """A request's options for reading its content; None stands for the settings."""

    tenant: str
    policy: Policy | None = None
    implicit: Implicit | None = None

    salt: str = ""
    """The request's own salt: chunks that are found by content, and earlier KV, are of requests
    with the same one."""

    special_tokens: bool = True
    """False to leave out the special tokens around a completion's text."""

    any_order: bool = False
    """True if documents, and neighbouring chunks, may be reordered."""

    keeps: bool = True
    """False if there will be no answer: marked texts become chunks, but no context caches are
    entered."""


@dataclass(frozen=True, slots=True)
class ReadDefaults:
    """The defaults of these options."""

    policy: Callable[[str], Policy]
    """Returns a tenant's default policy as it is now."""

    implicit: Implicit

    implicit_policy: Policy | None = None
    """The policy of prompts none of whose chunks was named by id; None for the default policy."""

    steered: bool = False
    """True if a quality target moves the default policy."""
