"""A text that has other tokens at its edges in a prompt shares those that agree."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvlinker.base.events import ChunkNamed, Event, Events, ImplicitText
from kvlinker.base.types.chunks import Chunk, ContextCache, GenerationContext, Origin
from kvlinker.base.types.messages import MarkedText, TextSource
from kvlinker.prompting.builder import PromptBuilder
from kvlinker.service.implicit import caches
from kvlinker.service.implicit.caches import FoundChunk, ImplicitCaches
from tests.toy_tokenizers import byte_level

BUILDER = PromptBuilder(byte_level(), context=GenerationContext.ALONE)
TEXT = "The cat sat on the mat. It was fine! Was it? Yes."
TOKENS = BUILDER.encoder.encode_data(TEXT)
PREFIX = (7, 8)


class Kept:
    """The catalog, in which TEXT is an answer, and what makes parts of it."""

    fingerprint = "model"
    max_model_len = 4096

    def __init__(self) -> None:
        chunk = Chunk(TOKENS, PREFIX, origin=Origin.ANSWER)
        self.cache = ContextCache("cc_1", "anna", "tiny", "model", chunk, "key", 0.0)
        self.kept: list[tuple[Chunk, str, int]] = []
        self.events: list[Event] = []
        events = Events()
        events.subscribe(self.events.append)
        this: Any = self
        self.implicit = SimpleNamespace(find=self.find)
        self.caches = ImplicitCaches(BUILDER, this, this, this, events, ttl=60.0)

    def find(self, contents: set[str], *_: Any) -> dict[str, list[ContextCache]]:
        own = self.cache.chunk.content
        return {own: [self.cache]} if own in contents else {}

    def keep_part(self, chunk: Chunk, whole: str, first: int, **_: Any) -> ContextCache | None:
        self.kept.append((chunk, whole, first))
        return self.cache


@pytest.mark.parametrize(
    ("before", "dropped", "behind"),
    [((), 0, ()), ((), 1, (5,)), ((5, 6), 0, (5,)), ((5,), 3, ()), ((), 2, (5, 6, 7))],
)
def test_the_tokens_that_agree_are_a_part(
    before: tuple[int, ...], dropped: int, behind: tuple[int, ...]
) -> None:
    kept = Kept()
    ids = (*before, *TOKENS[len(before) : len(TOKENS) - dropped], *behind)
    part = kept.caches.find_part(TEXT, ids, tenant="anna")
    assert part is not None
    assert ids[part.skipped :][: len(part.chunk)] == part.chunk.tokens
    assert TOKENS[part.first :][: len(part.chunk)] == part.chunk.tokens
    assert len(part.chunk) == len(TOKENS) - len(before) - dropped
    assert part.chunk.prefix == (*PREFIX, *TOKENS[: part.first])
    assert part.chunk.origin is Origin.ANSWER, "it carries its conversation"
    assert kept.caches.keep_part(part, TEXT, tenant="anna") == FoundChunk(
        kept.cache.chunk, kept.cache, created=True
    )
    assert kept.kept == [(part.chunk, "key", part.first)]
    assert kept.events == [ImplicitText(TextSource.RECOGNITION, "created")]


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        (TEXT, (*TOKENS[:10], 5, *TOKENS[11:])),
        (TEXT, TOKENS[:-8]),
        (TEXT, ()),
        ("The cat sat on another mat. It was fine!", TOKENS),
        ("", ()),
    ],
)
def test_other_tokens_within_are_another_text(text: str, ids: tuple[int, ...]) -> None:
    assert Kept().caches.find_part(text, ids, tenant="anna") is None


def named(kept: Kept, tenant: str) -> list[ChunkNamed]:
    """Use the text as ``tenant``, and return the names that are published."""
    chunk = kept.cache.chunk
    kept.events.clear()
    known = {chunk: FoundChunk(chunk, kept.cache, created=False)}
    assert kept.caches.use({chunk: MarkedText(TEXT)}, known, tenant=tenant) == known
    return [event for event in kept.events if isinstance(event, ChunkNamed)]


def test_names_are_published_again_when_others_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "MOST_NAMED", 2)
    kept = Kept()
    (event,) = named(kept, "anna")
    assert (event.chunk_key, event.owner) == ("key", "anna")
    assert not named(kept, "anna")
    assert named(kept, "ben") != [event], "another tenant's name"
    assert not named(kept, "anna")
    assert named(kept, "cleo")
    assert named(kept, "anna") == [event]
