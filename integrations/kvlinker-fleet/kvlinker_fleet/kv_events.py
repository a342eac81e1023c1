"""Follows which beginnings of prompts plain vLLM servers keep, by the events that they publish over
ZeroMQ. Needs kvlinker[kv-events]."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Annotated, Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import msgspec
import numpy as np
import zmq
import zmq.asyncio

from kvlinker_fleet.backends import UNANSWERED
from kvlinker_fleet.naming import PromptOutline
from kvlinker_fleet.router import Router

TOKENIZE_SECONDS = 2.0
"""The seconds after which a prompt is routed without its tokens."""

IN_MEMORY = (None, "GPU")
"""The media of blocks that a request takes without loading."""

FRAMES = 3
"""The parts of a message of vLLM's: a topic, the message's number, and a batch of events."""

_TOKENIZED = ("model", "messages", "prompt", "tools", "chat_template_kwargs", "chat_template")
_TOKENIZED_PATHS = frozenset(("/v1/chat/completions", "/v1/completions"))

logger = logging.getLogger("kvlinker.fleet.kv_events")

BlockHash = bytes | int

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class BlockStored(msgspec.Struct, tag=True):
    """Blocks that follow each other are in memory from now on."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[TokenId]
    block_size: Annotated[int, msgspec.Meta(gt=0)]
    medium: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, tag=True):
    """Blocks are in memory no more."""

    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """No block is in memory any more."""


class EventBatch(msgspec.Struct, array_like=True):
    """One message of vLLM."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


class Changes(NamedTuple):
    """Names of beginnings that a server has now, and of those that it has no more."""

    stored: list[str]
    removed: list[str]


class BlockChains:
    """Knows one server's blocks, by digests of all tokens up to their ends: the hash of a block
    depends on that server."""

    def __init__(self) -> None:
        self.block_size: int | None = None
        """The tokens of a block; None until the server has stored one."""

        self._names: dict[BlockHash, str] = {}
        self._decoder = msgspec.msgpack.Decoder(EventBatch)

    def take(self, payload: bytes) -> Changes:
        """Return the changes of a batch of events. Raises msgspec.DecodeError for other
        messages."""
        has: dict[str, bool] = {}
        for event in self._decoder.decode(payload).events:
            if isinstance(event, AllBlocksCleared):
                has |= dict.fromkeys(self._names.values(), False)
                self._names.clear()
            elif event.medium not in IN_MEMORY or event.group_idx:
                continue
            elif isinstance(event, BlockRemoved):
                gone = [self._names.pop(block, None) for block in event.block_hashes]
                has |= dict.fromkeys(filter(None, gone), False)
            else:
                has |= dict.fromkeys(self._store(event), True)
        return Changes(
            [name for name, there in has.items() if there],
            [name for name, there in has.items() if not there],
        )

    def clear(self) -> Changes:
        """Forget all blocks."""
        removed = list(self._names.values())
        self._names.clear()
        return Changes([], removed)

    def _store(self, event: BlockStored) -> Iterator[str]:
        """Yield the names of an event's blocks. There are none where the blocks before them are not
        known."""
        self.block_size = event.block_size
        parent = event.parent_block_hash
        name = "" if parent is None else self._names.get(parent)
        keys = event.extra_keys or [None] * len(event.block_hashes)
        tokens_of = _blocks(event.token_ids, event.block_size)
        blocks = zip(event.block_hashes, tokens_of, keys, strict=False)
        for block, tokens, extra in blocks:
            if name is None:
                return
            name = _name(name, tokens, extra)
            self._names[block] = name
            yield name


def beginnings_of(
    tokens: Sequence[int], block_size: int, salt: str | None = None
) -> tuple[tuple[str, int], ...]:
    """Return the names of a prompt's beginnings that end with a block, the shortest first, and
    their tokens. ``salt``: vLLM's ``cache_salt``, which belongs to the first block."""
    name, beginnings = "", []
    for number, block in enumerate(_blocks(tokens, block_size)):
        name = _name(name, block, [salt] if salt and not number else None)
        beginnings.append((name, (number + 1) * block_size))
    return tuple(beginnings)


class KVEvents:
    """Reports to a router which beginnings servers keep, and names requests' beginnings in the same
    way. Belongs to one event loop."""

    def __init__(
        self, router: Router, client: httpx.AsyncClient, endpoints: Mapping[str, str]
    ) -> None:
        """``endpoints`` are ZeroMQ's addresses of servers, by their URLs."""
        self._router = router
        self._client = client
        self._endpoints = dict(endpoints)
        self._chains = {url: BlockChains() for url in endpoints}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Follow all servers until ``stop``. Raises ZMQError for an address that is none."""
        self._context = zmq.asyncio.Context()
        for url, endpoint in self._endpoints.items():
            socket = self._context.socket(zmq.SUB)
            socket.subscribe(b"")
            socket.connect(endpoint)
            self._tasks.append(asyncio.create_task(self._follow(socket, url)))

    async def stop(self) -> None:
        """Follow them no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._context.destroy(linger=0)

    async def outline(
        self,
        prompt: PromptOutline,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        *,
        ready: Collection[str],
    ) -> PromptOutline:
        """Return the outline of a prompt for the router, with its beginnings by tokens, as a server
        counts them; unchanged where none of them does. Only the URLs in ``ready`` are asked: each
        request would wait for one that hangs."""
        if path not in _TOKENIZED_PATHS:
            return prompt
        for url, chains in self._chains.items():
            if url in ready and chains.block_size is not None:
                try:
                    asked = json.loads(body)
                    answer = await self._client.post(
                        url + "/tokenize",
                        json={name: asked[name] for name in _TOKENIZED if name in asked},
                        headers=headers,
                        timeout=TOKENIZE_SECONDS,
                    )
                    answer.raise_for_status()
                    found = beginnings_of(
                        answer.json()["tokens"], chains.block_size, asked.get("cache_salt")
                    )
                    return replace(prompt, beginnings=found)
                except UNANSWERED:
                    continue
                except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                    break  # no prompt, which its replica says
        return prompt

    async def _follow(self, socket: zmq.asyncio.Socket, url: str) -> None:
        chains, replica, expected = self._chains[url], urlsplit(url).netloc, 0
        while True:
            frames = await socket.recv_multipart()
            if len(frames) != FRAMES:
                logger.warning("Replica %s: a message of %d parts", replica, len(frames))
                continue
            _, number, payload = frames
            changes = []
            if int.from_bytes(number) != expected:  # the server was restarted, or some are lost
                changes.append(chains.clear())
            expected = int.from_bytes(number) + 1
            try:
                changes.append(chains.take(payload))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                logger.warning("Replica %s: an event that is not known: %s", replica, error)
            for stored, removed in changes:
                self._router.note_beginnings(replica, stored, removed)


def _blocks(tokens: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    """Yield the whole blocks of some tokens."""
    for begin in range(0, len(tokens) - size + 1, size):
        yield tokens[begin : begin + size]


def _name(parent: str, tokens: Sequence[int], extra: Iterable[Any] | None) -> str:
    digest = sha256(f"{parent}\0{list(extra or ())!r}\0".encode())
    digest.update(np.asarray(tokens, dtype=np.int64).tobytes())
    return digest.hexdigest()[:24]
