"""What callers write into prompts becomes typed values."""

from __future__ import annotations

from typing import Any

import pytest

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.types.chunks import Chunk
from kvlinker.base.types.messages import (
    ChatMessage,
    ContextCacheReference,
    Document,
    Implicit,
    MarkedText,
    TokenIds,
)
from kvlinker.service.content import parse_documents, parse_implicit, parse_messages, parse_prompt
from kvlinker.store import ContextCache

CACHE = ContextCache("cc_1", "default", "tiny", "fingerprint", Chunk((1, 2)), "key", 0.0)
ONE = ContextCacheReference("cc_1")


CONTENTS: list[tuple[Any, tuple[Any, ...]]] = [
    ("Hi", ("Hi",)),
    (None, ()),
    ([], ()),
    (["a", CACHE, "b"], ("a", ONE, "b")),
    (
        [
            {"type": "text", "text": "a", "cache_control": None},
            {"type": "context_cache", "id": "cc_1"},
        ],
        ("a", ONE),
    ),
    ((ONE, "a"), (ONE, "a")),
    (
        [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}],
        (MarkedText("a"),),
    ),
    (
        [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral", "ttl": "5m"}}],
        (MarkedText("a", 300.0),),
    ),
    (
        [{"type": "text", "text": "a", "prompt_cache_breakpoint": {"mode": "explicit"}}],
        (MarkedText("a"),),
    ),
    ([MarkedText("a", 5.0)], (MarkedText("a", 5.0),)),
]


def test_messages_become_values(subtests: pytest.Subtests) -> None:
    for content, parsed in CONTENTS:
        with subtests.test(content=content):
            message = ChatMessage("user", parsed, "ann")
            assert parse_messages([{"role": "user", "content": content, "name": "ann"}]) == (
                message,
            )
            assert parse_messages([message]) == (message,), "values stay as they are"


def test_calls_and_results_become_values() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    asked = {
        "role": "assistant",
        "content": None,
        "tool_calls": [call],
        "reasoning_content": "Hm.",
        "refusal": None,
    }
    result = {"role": "tool", "content": "x", "tool_call_id": "c1"}
    as_object = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    assert parse_messages([asked, result]) == (
        ChatMessage(
            "assistant", (), fields={"reasoning_content": "Hm.", "tool_calls": [as_object]}
        ),
        ChatMessage("tool", ("x",), fields={"tool_call_id": "c1"}),
    )


PROMPTS: list[tuple[Any, Any]] = [
    ("Hi", ("Hi",)),
    ([5, 6], TokenIds((5, 6))),
    ([], TokenIds(())),
    (TokenIds((5,)), TokenIds((5,))),
    (["a", CACHE], ("a", ONE)),
    ([{"type": "context_cache", "id": "cc_1"}], (ONE,)),
]


def test_prompts_become_values(subtests: pytest.Subtests) -> None:
    for prompt, parsed in PROMPTS:
        with subtests.test(prompt=prompt):
            assert parse_prompt(prompt) == parsed
            assert parse_prompt(parsed) == parsed, "values stay as they are"


MISTAKES: list[tuple[Any, str]] = [
    ("Hi", "Message 1 is 'Hi', but must be a mapping"),
    ({"content": "a"}, "role of message 1 is None"),
    ({"role": 3, "content": "a"}, "role of message 1 is 3"),
    ({"role": "user", "content": 7}, "content of message 1 is 7"),
    ({"role": "user", "content": "a", "nme": "b"}, "field 'nme'.*Did you mean 'name'"),
    ({"role": "user", "content": "a", "name": 5}, "name of message 1 is 5"),
    ({"role": "assistant", "tool_calls": ["f"]}, "tool_calls of message 1 are"),
    ({"role": "assistant", "tool_calls": 5}, "tool_calls of message 1 are 5"),
    ({"role": "assistant", "tool_calls": [{"id": "c1"}]}, "needs a 'function'"),
    (
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "x"}}]},
        "a JSON object",
    ),
    ({"role": "user", "content": [7]}, "A content part is 7"),
    (
        {"role": "user", "content": [{"type": "image_url"}]},
        "'image_url': only 'text' and 'context_cache'",
    ),
    (
        {"role": "user", "content": [{"text": "a"}]},
        "type None: only 'text' and 'context_cache'",
    ),
    ({"role": "user", "content": [{"type": "text"}]}, "'text' needs 'text', a text"),
    (
        {"role": "user", "content": [{"type": "context_cache", "id": 5}]},
        "'context_cache' needs 'id', a text",
    ),
]


def test_mistakes_in_messages_are_named(subtests: pytest.Subtests) -> None:
    for message, words in MISTAKES:
        with subtests.test(message=message):
            with pytest.raises(InvalidRequestError, match=words) as caught:
                parse_messages([{"role": "user", "content": "a"}, message])
            assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([1, "x"], "mixes token ids"),
        ([0.5], "content part is 0.5"),
        ([{"type": "x"}], "type 'x'"),
        (None, "'prompt' is None"),
        ({"type": "text", "text": "a"}, "'prompt' is {'type': 'text'"),
    ],
)
def test_mistakes_in_prompts_are_named(prompt: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        parse_prompt(prompt)
    assert caught.value.param == "prompt"


BAD_MARKS: list[tuple[dict[str, Any], str]] = [
    ({"cache_control": {}}, "'cache_control' is {}, but must be {'type': 'ephemeral'}"),
    ({"cache_control": {"type": "eternal"}}, "'cache_control' is {'type': 'eternal'}"),
    ({"cache_control": {"type": "ephemeral", "ttl": "0m"}}, "'0m' is no time to live"),
    ({"cache_control": {"type": "ephemeral", "ttl": "25h"}}, "'25h' is longer than a day"),
    ({"prompt_cache_breakpoint": {}}, "must be {'mode': 'explicit'}"),
    ({"prompt_cache_breakpoint": {"mode": "x"}}, "must be {'mode': 'explicit'}"),
]


def test_mistakes_in_marks_are_named(subtests: pytest.Subtests) -> None:
    for mark, words in BAD_MARKS:
        with subtests.test(mark=mark), pytest.raises(InvalidRequestError, match=words):
            parse_messages([{"role": "user", "content": [{"type": "text", "text": "a", **mark}]}])


def test_documents_become_values() -> None:
    parsed: tuple[Document[Any], ...] = (
        Document(MarkedText("a"), {"title": "One", "source": "web"}),
    )
    assert parse_documents([{"text": "a", "title": "One", "source": "web"}]) == parsed
    assert parse_documents(parsed) == parsed
    with pytest.raises(InvalidRequestError, match="Document 1 is"):
        parse_documents([{"text": "a"}, {"title": "b"}])


def test_modes_have_names() -> None:
    assert parse_implicit("auto") is Implicit.AUTO
    one_of = "'sometimes', but must be one of structure, auto, marked, off"
    with pytest.raises(InvalidRequestError, match=one_of):
        parse_implicit("sometimes")
