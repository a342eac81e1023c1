"""What callers write into prompts becomes typed values, and these become prompts with chunks in their places."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from kvlinker.content import ContentReader, parse_messages, parse_prompt
from kvlinker.errors import ContextCacheNotFoundError, InvalidRequestError
from kvlinker.store import ContextCache
from kvlinker.types.chunks import Chunk
from kvlinker.types.messages import ChatMessage, ContextCacheReference, TokenIds

CACHE = ContextCache("cc_1", "default", "tiny", "fingerprint", Chunk((1, 2)), "key", 0.0)
ONE = ContextCacheReference("cc_1")


class Caches:
    """Context caches as ``ContentReader`` asks for them: ``known`` by id. Notes what is asked."""

    def __init__(self, known: dict[str, Chunk]) -> None:
        self.known = known
        self.asked: list[tuple[str, ...]] = []

    def chunks(self, cache_ids: Iterable[str], *, tenant: str) -> dict[str, Chunk]:
        assert tenant == "anna"
        wanted = tuple(cache_ids)
        self.asked.append(wanted)
        for cache_id in wanted:
            if cache_id not in self.known:
                raise ContextCacheNotFoundError(cache_id)
        return {cache_id: self.known[cache_id] for cache_id in wanted}


class Builder:
    """Gives back what it is to build a prompt of."""

    def chat(self, messages: Sequence[ChatMessage[Chunk]]) -> Any:
        return list(messages)

    def completion(self, prompt: Any) -> Any:
        return prompt


@pytest.mark.parametrize(
    ("content", "parsed"),
    [
        ("Hi", ("Hi",)),
        (None, ()),
        ([], ()),
        (["a", CACHE, "b"], ("a", ONE, "b")),
        ([{"type": "text", "text": "a", "cache_control": {}}, {"type": "context_cache", "id": "cc_1"}], ("a", ONE)),
        ((ONE, "a"), (ONE, "a")),
    ],
)
def test_messages_become_values(content: Any, parsed: tuple[Any, ...]) -> None:
    message = ChatMessage("user", parsed, "ann")
    assert parse_messages([{"role": "user", "content": content, "name": "ann"}]) == (message,)
    assert parse_messages([message]) == (message,), "values stay as they are"


@pytest.mark.parametrize(
    ("prompt", "parsed"),
    [
        ("Hi", ("Hi",)),
        ([5, 6], TokenIds((5, 6))),
        ([], TokenIds(())),
        (TokenIds((5,)), TokenIds((5,))),
        (["a", CACHE], ("a", ONE)),
        ([{"type": "context_cache", "id": "cc_1"}], (ONE,)),
    ],
)
def test_prompts_become_values(prompt: Any, parsed: Any) -> None:
    assert parse_prompt(prompt) == parsed
    assert parse_prompt(parsed) == parsed, "values stay as they are"


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"content": "a"}, "role of message 1 is None"),
        ({"role": 3, "content": "a"}, "role of message 1 is 3"),
        ({"role": "user", "content": 7}, "content of message 1 is 7"),
        ({"role": "user", "content": [7]}, "A content part is 7"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "'image_url': only 'text' and 'context_cache'"),
        ({"role": "user", "content": [{"text": "a"}]}, "type None: only 'text' and 'context_cache'"),
        ({"role": "user", "content": [{"type": "text"}]}, "'text' needs 'text', a text"),
        ({"role": "user", "content": [{"type": "context_cache", "id": 5}]}, "'context_cache' needs 'id', a text"),
    ],
)
def test_mistakes_in_messages_are_named(message: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        parse_messages([{"role": "user", "content": "a"}, message])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("prompt", "words"), [([1, "x"], "mixes token ids"), ([0.5], "content part is 0.5"), ([{"type": "x"}], "type 'x'")]
)
def test_mistakes_in_prompts_are_named(prompt: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        parse_prompt(prompt)
    assert caught.value.param == "prompt"


def reader(*ids: str) -> tuple[Any, Caches]:
    """A ContentReader, whose prompts are what its builder was given."""
    caches = Caches({cache_id: Chunk((number,)) for number, cache_id in enumerate(ids)})
    return ContentReader(Builder(), caches), caches  # type: ignore[arg-type]


def test_chunks_take_the_places_of_references() -> None:
    reading, caches = reader("cc_1", "cc_2")
    two = ContextCacheReference("cc_2")
    messages = [ChatMessage("system", (two, "a", ONE)), ChatMessage("user", ("b", two), "ann")]
    read = reading.chat(messages, tenant="anna")
    assert read.prompt == [
        ChatMessage("system", (Chunk((1,)), "a", Chunk((0,)))),
        ChatMessage("user", ("b", Chunk((1,))), "ann"),
    ]
    assert read.chunks == {"cc_2": Chunk((1,)), "cc_1": Chunk((0,))}
    assert caches.asked == [("cc_2", "cc_1")], "once, and each id once"
    assert reading.completion((ONE, "a"), tenant="anna").prompt == (Chunk((0,)), "a")


def test_content_without_context_caches_asks_for_none() -> None:
    reading, caches = reader()
    assert reading.chat([ChatMessage("user", ("a",))], tenant="anna") == ([ChatMessage("user", ("a",))], {})
    assert reading.completion(("a",), tenant="anna") == (("a",), {})
    assert reading.completion(TokenIds((1,)), tenant="anna") == ((1,), {})
    assert caches.asked == []


def test_the_first_place_of_an_unknown_id_is_named() -> None:
    reading, _ = reader("cc_1")
    lost = ContextCacheReference("cc_2")
    messages = [ChatMessage("user", (ONE,)), ChatMessage("user", ("a", ONE, lost)), ChatMessage("user", (lost,))]
    with pytest.raises(ContextCacheNotFoundError) as caught:
        reading.chat(messages, tenant="anna")
    assert (caught.value.cache_id, caught.value.param) == ("cc_2", "messages.1.content.2.id")
    with pytest.raises(ContextCacheNotFoundError) as caught:
        reading.completion(("a", lost), tenant="anna")
    assert caught.value.param == "prompt.1.id"
