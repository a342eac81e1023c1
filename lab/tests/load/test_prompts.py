"""Requests bring documents as context caches or as text, and orders that prefix caches find
again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvlinker_lab.load.prompts import (
    CachedDocuments,
    MarkedDocuments,
    PlainDocuments,
    PrefixIndex,
    write_request,
)
from kvlinker_lab.load.traffic import Conversation, Turn

TEXTS = ("A.", "B.", "C.")
CONVERSATION = Conversation((Turn((2, 0), "Which?", 5), Turn((1,), "And now?", 7)), preamble=(0,))


def test_documents_as_text() -> None:
    body = write_request(CONVERSATION, ["The first."], PlainDocuments(TEXTS), model="m")
    assert body["messages"] == [
        {"role": "system", "content": "A."},
        {"role": "user", "content": "C.A.Which?"},
        {"role": "assistant", "content": "The first."},
        {"role": "user", "content": "B.And now?"},
    ]
    assert (body["model"], body["max_tokens"], body["stream_options"]) == (
        "m",
        7,
        {"include_usage": True},
    )
    assert "link" not in body


def test_documents_as_marked_texts() -> None:
    body = write_request(CONVERSATION, [], MarkedDocuments(TEXTS, "naive"), model="m")
    mark = {"type": "ephemeral"}
    assert body["messages"][1]["content"] == [
        {"type": "text", "text": "C.", "cache_control": mark},
        {"type": "text", "text": "A.", "cache_control": mark},
        {"type": "text", "text": "Which?"},
    ]
    assert body["link"] == {"policy": "naive"}


def test_documents_as_context_caches() -> None:
    form = CachedDocuments(["cc_a", "cc_b", "cc_c"], "legolink-16")
    body = write_request(CONVERSATION, [], form, model="m")
    assert body["messages"] == [
        {"role": "system", "content": [{"type": "context_cache", "id": "cc_a"}]},
        {
            "role": "user",
            "content": [
                {"type": "context_cache", "id": "cc_c"},
                {"type": "context_cache", "id": "cc_a"},
                {"type": "text", "text": "Which?"},
            ],
        },
    ]
    assert body["link"] == {"policy": "legolink-16"}
    assert body["max_tokens"] == 5


def test_the_longest_known_beginning_comes_first() -> None:
    index = PrefixIndex()
    assert index.arrange([5, 1, 2]) == (5, 1, 2)
    assert index.arrange([2, 7, 5]) == (
        5,
        2,
        7,
    )  # 5 has begun a prompt; 2 was asked for before, and 7 was not
    assert index.arrange([2, 1, 5]) == (5, 1, 2)
    assert index.arrange([8, 9]) == (8, 9)


def test_only_first_turns_are_reordered() -> None:
    index = PrefixIndex()
    index.arrange([0, 2])
    reordered = index.reorder(CONVERSATION)
    assert [turn.documents for turn in reordered.turns] == [(0, 2), (1,)]
    assert reordered.preamble == CONVERSATION.preamble
    assert reordered.turns[0].question == "Which?"


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5, unique=True), max_size=20))
def test_the_same_documents_come_in_the_same_order_again(prompts: list[list[int]]) -> None:
    index = PrefixIndex()
    arranged = [index.arrange(prompt) for prompt in prompts]
    assert [set(order) for order in arranged] == [set(prompt) for prompt in prompts]
    assert all(len(order) == len(prompt) for order, prompt in zip(arranged, prompts, strict=True))
    for before, prompt in enumerate(prompts):
        if set(prompt) in (set(other) for other in prompts[:before]):
            assert (
                arranged[before] in arranged[:before]
            )  # the same documents in the same order again
