"""The context caches that document commands work on: those of a state directory, with a model here,
or a server's."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from kvlinker.base.errors import ContextCacheNotFoundError
from kvlinker.base.garbage import importing
from kvlinker.base.loading import Loading
from kvlinker.base.types.texts import Piece, SearchHit
from kvlinker.cli.loading import shown
from kvlinker.cli.running import joined
from kvlinker.engines.contract.cost import ChunkSize
from kvlinker.engines.contract.model_place import check_model
from kvlinker.settings import Settings

if TYPE_CHECKING:
    from kvlinker.base.types.chunks import ContextCache
    from kvlinker.doors.client import Client
    from kvlinker.llm import LLM

MODEL_SETTINGS = (
    "model",
    "served_model_name",
    "engine",
    "dtype",
    "device",
    "trust_remote_code",
    "chat_template",
    "system_prompt",
    "max_model_len",
    "kv_slots",
    "max_step_tokens",
    "threads",
    "embedding_model",
    "state_dir",
    "host_memory",
)
"""The settings of commands that load a model."""

PAGE = 100

WRITTEN_SECONDS = 10.0
"""The longest wait for a server to write cached chunks."""

LOOK_AGAIN_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class ExistingCache:
    """A context cache that exists already."""

    id: str
    tokens: int
    metadata: Mapping[str, str]

    usable: bool
    """False if it was made with another model than the library's."""


@dataclass(frozen=True, slots=True)
class Storage:
    """The space of KV in the disk tier, over all tenants."""

    kv_bytes: ChunkSize
    """The size of a chunk's KV as computed, before a codec."""

    codec: str
    """The name of the codec that writes KV to the disk."""

    used_bytes: int
    budget_bytes: int


class CacheLibrary(ABC):
    """The context caches of one tenant, with the model that makes and uses them."""

    def __init__(self, calls: Any, **own: Any) -> None:
        """``calls`` is an ``LLM`` or a ``Client``, whose calls have the same names; ``own`` are
        given to each."""
        self._calls = calls
        self._own = own

    @abstractmethod
    def split(self, text: str, *, method: str, max_tokens: int) -> tuple[Piece, ...]:
        """Cut a text into pieces that may become chunks. Raises InvalidRequestError."""

    def cache(
        self, texts: Sequence[str], metadata: Sequence[Mapping[str, str]], **options: Any
    ) -> list[str]:
        """Create a context cache of each text, with the metadata in the same place; returns their
        ids.

        ``options``: ``name``, and ``ttl`` in seconds.
        """
        made = self._calls.generate_context_cache(
            texts, metadata=list(metadata), **self._own, **options
        )
        return [cache.id for cache in made]

    def caches(self, metadata: Mapping[str, str]) -> Iterator[ExistingCache]:
        """Yield the context caches that have all these pairs, the oldest first."""
        for one in _all(partial(self._calls.list_caches, **self._own), metadata):
            yield ExistingCache(one.id, one.tokens, one.metadata, self._is_usable(one))

    def delete(self, cache_id: str) -> None:
        """Delete a context cache; one that does not exist is deleted already."""
        with suppress(ContextCacheNotFoundError):
            self._calls.expire_cache(cache_id, **self._own)

    def search(
        self, query: str, *, limit: int, metadata: Mapping[str, str]
    ) -> tuple[SearchHit, ...]:
        """Find context caches as ``LLM.search`` does, the best match first. Raises
        InvalidRequestError."""
        found: tuple[SearchHit, ...] = self._calls.search(
            query, limit=limit, metadata=metadata, **self._own
        )
        return found

    def answer(
        self, content: Sequence[SearchHit | str], *, policy: str | None, max_tokens: int
    ) -> str:
        """Answer one user message, greedily."""
        message = {"role": "user", "content": list(content)}
        text: str = self._calls.chat_completion(
            [message], policy=policy, max_tokens=max_tokens, temperature=0, **self._own
        ).text
        return text

    def settle(self) -> None:  # noqa: B027
        """Wait until cached chunks can be found, if the process ends with the command."""

    @abstractmethod
    def storage(self) -> Storage:
        """Report the disk space of KV, once everything that was cached is written."""

    @abstractmethod
    def _is_usable(self, cache: Any) -> bool: ...


class LocalLibrary(CacheLibrary):
    """Works on a state directory with a model in this process."""

    def __init__(self, llm: LLM, tenant: str) -> None:
        super().__init__(llm, tenant=tenant)
        self._llm = llm

    def split(self, text: str, *, method: str, max_tokens: int) -> tuple[Piece, ...]:
        return self._llm.split_pieces(text, method=method, max_tokens=max_tokens)

    def cache(
        self, texts: Sequence[str], metadata: Sequence[Mapping[str, str]], **options: Any
    ) -> list[str]:
        made = super().cache(texts, metadata, **options)
        # context caches that are reported are on the disk, even if the process is killed
        self._llm.store.flush()
        return made

    def settle(self) -> None:
        self._llm.caches.settle()

    def storage(self) -> Storage:
        disk = next((tier for tier in self._llm.tiers() if tier.name == "disk"), None)
        used, budget = (0, 0) if disk is None else (disk.used_bytes, disk.budget_bytes)
        return Storage(
            ChunkSize.of(self._llm.engine.kv_bytes), self._llm.settings.disk_codec, used, budget
        )

    def _is_usable(self, cache: ContextCache) -> bool:
        return self._llm.caches.is_usable(cache)


class RemoteLibrary(CacheLibrary):
    """The context caches of a running server, which does the work."""

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self._client = client

    def split(self, text: str, *, method: str, max_tokens: int) -> tuple[Piece, ...]:
        return self._client.split_text(text, method=method, max_tokens=max_tokens)

    def storage(self) -> Storage:
        deadline = time.monotonic() + WRITTEN_SECONDS
        status = self._client.server_status()
        disk = _disk_of(status)
        while time.monotonic() < deadline:
            time.sleep(LOOK_AGAIN_SECONDS)
            before, disk = disk, _disk_of(self._client.server_status())
            if disk["used_bytes"] == before["used_bytes"]:
                break
        return Storage(
            ChunkSize(status["kv_bytes_per_token"], status["kv_bytes_per_chunk"]),
            status["disk_codec"],
            disk["used_bytes"],
            disk["budget_bytes"],
        )

    def _is_usable(self, cache: Any) -> bool:
        return bool(cache.usable)


@contextmanager
def open_library(
    settings: Settings, *, url: str | None, api_key: str | None
) -> Iterator[CacheLibrary]:
    """Open the library of a server: the one at ``url``, or without one, that which runs on the
    state directory; without a server, load the model. The context caches are the key's.

    Raises the errors of ``LLM`` and ``Client``.
    """
    if url is not None:
        from kvlinker.doors.client import Client

        with Client(url, api_key) as client:
            yield RemoteLibrary(client)
        return
    with joined(settings, api_key) as found:
        if found is not None:
            server, client = found
            typer.echo(f"kvlinker: by the server at {server.url}, with {server.model}", err=True)
            yield RemoteLibrary(client)
            return
    check_model(settings)
    loading = Loading(settings.model)
    with shown(loading, Console(stderr=True, highlight=False)):
        with importing():
            from kvlinker.base.types.tenants import DEFAULT_TENANT, tenant_of_key
            from kvlinker.llm import LLM

        llm = LLM.from_settings(settings, report=loading.report)
        llm.caches.settle()
    with llm:
        yield LocalLibrary(llm, DEFAULT_TENANT if api_key is None else tenant_of_key(api_key))


def _disk_of(status: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the disk tier's figures; a server without one has a tier of no bytes."""
    none = {"used_bytes": 0, "budget_bytes": 0}
    found: Mapping[str, Any] = next(
        (tier for tier in status["tiers"] if tier["name"] == "disk"), none
    )
    return found


def _all(list_caches: Callable[..., Any], metadata: Mapping[str, str]) -> Iterator[Any]:
    """Yield the items of all pages that ``list_caches``, of an LLM or a client, returns, the oldest
    first."""
    page = list_caches(limit=PAGE, order="asc", metadata=metadata)
    yield from page.items
    while page.has_more:
        page = list_caches(limit=PAGE, order="asc", metadata=metadata, after=page.items[-1])
        yield from page.items
