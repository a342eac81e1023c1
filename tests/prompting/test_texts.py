"""Prompts have the texts of their tokens, and their token ids do not depend on it."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlinker.base.types.chunks import Chunk, GenerationContext
from kvlinker.base.types.messages import ChatMessage, TemplateOptions
from kvlinker.prompting.builder import PromptBuilder
from kvlinker.prompting.segments import CachedSegment, FreshSegment, Prompt
from tests.prompting.templates import CHATML, TRIMMING, WITH_NAMES
from tests.properties import examples
from tests.toy_tokenizers import byte_level, metaspace, unigram, word_level

TOKENIZERS = [
    byte_level(),
    byte_level(bos=False),
    byte_level(add_prefix_space=True),
    metaspace("first"),
    metaspace("prepend"),
    word_level(),
    unigram(),
]
PARTS = st.sampled_from(
    ["the cat", " ", "\n", "\n\n", '{"a": [{}]}', "}}}\n", "}}", "é", "日本", "<|end|>", ".", "  x"]
)
TEXTS = st.lists(PARTS, max_size=12).map("".join)


def builder(tokenizer: Any = None, template: str = CHATML) -> PromptBuilder:
    return PromptBuilder(
        tokenizer or byte_level(), context=GenerationContext.ALONE, chat_template=template
    )


BUILDERS = [
    builder(tokenizer, template) for tokenizer in TOKENIZERS for template in (CHATML, TRIMMING)
]


@given(
    st.sampled_from(BUILDERS),
    st.lists(TEXTS, min_size=1, max_size=4),
    st.integers(0, 4),
    st.data(),
)
@examples(300)
def test_texts_change_no_token_ids(
    built: PromptBuilder, texts: list[str], at: int, data: st.DataObject
) -> None:
    parts: list[str | Chunk] = ["a", *texts]
    parts.insert(at + 1, Chunk((1, 2, 3)))
    plain, told = (built.completion(parts, with_texts=each) for each in (False, True))
    assert told == plain
    tokens = plain.tokens.tolist()
    for source in told.texts:
        assert len(source.places.starts) == len(source.places.ends)
        assert (source.places.starts <= source.places.ends).all()
        count = len(source.places.starts)
        own = tokens[source.first : source.first + count]
        first = built.encoder.encode_prompt(source.text, continued=source.first > 1)
        assert tuple(own) == first
        begin = data.draw(st.integers(0, len(source.text)))
        end = data.draw(st.integers(begin, len(source.text)))
        low, high = source.tokens_within(begin, end)
        assert source.first <= low <= high <= source.first + count
        inside = slice(low - source.first, high - source.first)
        assert (source.places.starts[inside] >= begin).all()
        assert (source.places.ends[inside] <= end).all()


def test_messages_and_definitions_are_found() -> None:
    built = builder(template="{% for t in tools or [] %}{{ t | tojson }} {% endfor %}" + WITH_NAMES)
    tools = tuple({"type": "function", "function": {"name": name}} for name in ("one", "two"))
    messages: list[ChatMessage[Chunk]] = [
        ChatMessage("user", (text,)) for text in (" The cat. ", "It.")
    ]
    prompt = built.chat(messages, options=TemplateOptions(tools=tools), with_texts=True)
    (source,) = prompt.texts
    assert [source.text[begin:end] for begin, end in source.messages] == ["The cat.", "It."]
    definitions = [source.text[begin:end] for begin, end in source.definitions]
    assert definitions == [json.dumps(tool) for tool in tools]
    assert "".join(source.text[begin:end] for begin, end in source.sections) == source.text


def test_texts_say_which_chunks_stand_before_them() -> None:
    one, two = Chunk((1,)), Chunk((2,))
    parts: list[str | Chunk] = ["a", one, two, "b"]
    first, last = builder().completion(parts, with_texts=True).texts
    assert (first.before, last.before) == ("", f"{one.content} {two.content}")


def test_chunks_take_the_places_of_their_tokens() -> None:
    prompt = Prompt(
        (FreshSegment((1, 2, 3, 4, 5)), CachedSegment(Chunk((6,))), FreshSegment((7, 8)))
    )
    chunks = {1: Chunk((2, 3)), 3: Chunk((4,)), 6: Chunk((7, 8))}
    linked = prompt.with_chunks_at(chunks)
    assert linked.tokens.tolist() == prompt.tokens.tolist()
    assert [(span.start, span.end) for span in linked.spans] == [(1, 3), (3, 4), (5, 6), (6, 8)]
    assert all(segment.tokens for segment in linked.segments)
    for wrong in ({1: Chunk((3,))}, {1: Chunk((2, 3)), 2: Chunk((3,))}, {4: Chunk((5, 6))}):
        with pytest.raises(ValueError, match="other tokens"):
            prompt.with_chunks_at(wrong)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), max_size=6))
def test_any_chunks_leave_the_ids(places: list[tuple[int, int]]) -> None:
    prompt = Prompt((FreshSegment(tuple(range(20))),))
    apart = sorted({begin * 2: length for begin, length in places}.items())
    chunks = {
        begin: Chunk(tuple(range(begin, min(begin + length, after))))
        for (begin, length), (after, _) in pairwise([*apart, (20, 0)])
    }
    linked = prompt.with_chunks_at(chunks)
    assert linked.tokens.tolist() == list(range(20))
    starts = [span.start for span in linked.spans]
    assert dict(zip(starts, linked.chunks, strict=True)) == chunks
