"""Finds the known texts in a request, without a tokenizer: context caches by their ids, marked
texts and documents by their digests, plain texts by their lines, conversations by their
beginnings."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from typing import Any, NamedTuple

from kvlinker.base.types.residency import lines_of, text_name
from kvlinker.service.implicit.seen_lines import LEAST_CHARACTERS

CHARACTERS_PER_TOKEN = 4
"""A token's length where only its text is known."""

MOST_NAMED = 1000
"""The most chunks, and the most turns of a conversation, that are looked at."""

_TEXTS = frozenset({"content", "text", "prompt", "input", "system", "instructions"})
"""The fields of bodies that have plain texts."""

UNKNOWN_TOKENS = 512
"""The length of a chunk, or a conversation, of which only the id is known."""


class WantedChunk(NamedTuple):
    """A chunk that a prompt wants: its name, and about how many tokens it has."""

    name: str
    tokens: int


@dataclass(frozen=True, slots=True)
class PromptOutline:
    """The parts of a prompt that a router uses."""

    chunks: tuple[WantedChunk, ...] = ()

    beginnings: tuple[tuple[str, int], ...] = ()
    """The names of a conversation's beginnings, the shortest first, and about how many tokens each
    has in addition to its chunks and lines."""

    lines: tuple[WantedChunk, ...] = ()
    """Lines of plain texts, some of which may be in chunks."""


def outline_of(body: object, tenant: str, *, recognised: bool = False) -> PromptOutline:
    """Return the names in a request's JSON body, in any of the server's APIs; none if it has no
    prompt. ``recognised``: servers also find chunks in plain texts, unless the request turns that
    off."""
    if not isinstance(body, dict):
        return PromptOutline()
    options = body.get("link")
    implicit = options.get("implicit") if isinstance(options, dict) else None
    recognised = implicit in ("auto", "structure") or (recognised and implicit is None)
    chunks = {chunk.name: chunk for chunk in islice(_chunks(body, tenant), MOST_NAMED)}
    lines: dict[str, WantedChunk] = {}
    if recognised:
        lines = {line.name: line for line in islice(_lines(body, tenant), MOST_NAMED)}
    turns, previous = body.get("messages", body.get("input")), body.get("previous_response_id")
    beginnings: Iterable[tuple[str, int]] = ()
    if isinstance(previous, str):  # what follows on it begins no conversation
        beginnings = [(response_name(previous, tenant), UNKNOWN_TOKENS)]
    elif isinstance(turns, list):
        beginnings = _beginnings(body.get("system"), turns, tenant, recognised=recognised)
    return PromptOutline(tuple(chunks.values()), tuple(beginnings), tuple(lines.values()))


def response_name(response_id: str, tenant: str) -> str:
    """Return the name of the conversation up to a kept response, as the beginning of those that go
    on from it."""
    return sha256(f"{tenant}\0{response_id}".encode(errors="replace")).hexdigest()[:24]


def _chunks(value: object, tenant: str) -> Iterator[WantedChunk]:
    """Yield the chunks that a part of a body names."""
    if isinstance(value, dict):
        if value.get("type") == "context_cache" and isinstance(value.get("id"), str):
            yield WantedChunk(value["id"], UNKNOWN_TOKENS)
        elif _is_marked(value) and isinstance(value.get("text"), str):
            yield _text(value["text"], tenant)
        documents = value.get("documents")
        if isinstance(documents, list):
            for document in documents:
                if isinstance(document, dict) and isinstance(document.get("text"), str):
                    yield _text(document["text"], tenant)
        for inner in value.values():
            yield from _chunks(inner, tenant)
    elif isinstance(value, list):
        for inner in value:
            yield from _chunks(inner, tenant)


def _lines(value: object, tenant: str, *, plain: bool = False) -> Iterator[WantedChunk]:
    """Yield the lines of a body's long texts that are not chunks already; ``plain``: a string here
    is such a text."""
    if isinstance(value, str):
        if plain and len(value) >= LEAST_CHARACTERS:
            for line in lines_of(value):
                yield _text(line, tenant)
    elif isinstance(value, list):
        for inner in value:
            yield from _lines(inner, tenant, plain=plain)
    elif isinstance(value, dict) and not _is_marked(value):
        for name, inner in value.items():
            if name != "documents":
                yield from _lines(inner, tenant, plain=name in _TEXTS)


def _is_marked(part: Mapping[str, Any]) -> bool:
    return bool(part.get("cache_control") or part.get("prompt_cache_breakpoint"))


def _text(text: str, tenant: str) -> WantedChunk:
    return WantedChunk(text_name(text, tenant), 1 + len(text) // CHARACTERS_PER_TOKEN)


def _beginnings(
    system: object, turns: Sequence[object], tenant: str, *, recognised: bool
) -> Iterator[tuple[str, int]]:
    """Yield a name for the conversation up to each of its turns."""
    digest = sha256(f"{tenant}\0{json.dumps(system)}".encode())
    length = 0
    for turn in turns[:MOST_NAMED]:
        written = json.dumps(turn, sort_keys=True)
        digest.update(written.encode())
        known = sum(chunk.tokens for chunk in _chunks(turn, tenant))
        if recognised:
            known += sum(line.tokens for line in _lines(turn, tenant))
        length += max(1, len(written) // CHARACTERS_PER_TOKEN - known)
        yield digest.hexdigest()[:24], length
