"""Texts that cannot fit into the context window are refused, at best before any of them is
encoded."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlinker.base.errors import ContextLengthError, InvalidRequestError
from kvlinker.base.types.chunks import GenerationContext
from kvlinker.base.types.messages import ChatMessage
from kvlinker.prompting.builder import PromptBuilder
from kvlinker.prompting.encoding import LEAST_CHARACTERS, LengthLimit, TextEncoder
from tests.toy_tokenizers import byte_level, metaspace, word_level

WINDOW = 16
ENCODERS = {kind.__name__: TextEncoder(kind()) for kind in (byte_level, metaspace, word_level)}


@pytest.fixture(params=ENCODERS)
def limit(request: pytest.FixtureRequest) -> LengthLimit:
    return LengthLimit(ENCODERS[request.param], WINDOW)


@given(text=st.text(alphabet="the cat sat on the mat.\n\té<>", max_size=4 * WINDOW))
@pytest.mark.parametrize("encoder", ENCODERS.values(), ids=ENCODERS)
def test_what_fits_passes(encoder: TextEncoder, text: str) -> None:
    tokens = encoder.count_roughly(text)
    LengthLimit(encoder, max(1, tokens)).check_texts([text], param="messages")


def test_the_bound_is_the_windows(limit: LengthLimit) -> None:
    assert limit.max_characters >= WINDOW * LEAST_CHARACTERS
    limit.check_texts(["a" * WINDOW], param="messages")
    with pytest.raises(
        ContextLengthError, match=f"{limit.max_characters + 1:,} characters"
    ) as caught:
        limit.check_texts(["a", "b" * limit.max_characters], param="messages")
    assert caught.value.param == "messages"
    assert f"{WINDOW} tokens" in caught.value.message
    assert caught.value.message.endswith("Shorten it, or split it into chunks.")


def test_too_many_characters_are_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = LengthLimit(ENCODERS["byte_level"], WINDOW)
    monkeypatch.setattr(TextEncoder, "count_roughly", lambda *_: pytest.fail("it was encoded"))
    with pytest.raises(ContextLengthError):
        limit.check_texts(["a" * 10**7], param="messages")


def test_a_long_text_is_refused_by_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = ENCODERS["byte_level"]
    encoded = []

    def counting(self: TextEncoder, text: str) -> int:
        encoded.append(len(text))
        return 2 * WINDOW + 1

    monkeypatch.setattr(TextEncoder, "count_roughly", counting)
    limit = LengthLimit(encoder, WINDOW)
    with pytest.raises(ContextLengthError, match=f"{2 * WINDOW + 1} tokens"):
        limit.check_texts(["z" * limit.max_characters], param="messages")
    assert encoded == [16 * WINDOW]


def builder(window: int = WINDOW) -> PromptBuilder:
    template = "{% for each in messages %}{{ each['name'] }}{{ each['content'] }}{% endfor %}"
    return PromptBuilder(
        byte_level(), context=GenerationContext.ALONE, chat_template=template, max_tokens=window
    )


def test_every_way_into_a_prompt_is_limited() -> None:
    long = "a" * 10**5
    built = builder()
    for param, call in (
        (
            "messages",
            lambda: built.chat([ChatMessage("user", ("Hi",)), ChatMessage("user", (long,))]),
        ),
        ("messages", lambda: built.chat([ChatMessage("user", ("Hi",), long)])),
        ("prompt", lambda: built.completion(long)),
        ("prompt", lambda: built.completion(("a", built.encode_chunk("a"), long))),
        ("prompt", lambda: built.completion([5] * (WINDOW + 1))),
        ("chunks", lambda: built.encode_chunk(long)),
        ("text", lambda: built.token_ids(long, param="text")),
    ):
        with pytest.raises(ContextLengthError) as caught:
            call()
        assert caught.value.param == param
    assert len(built.completion([5] * WINDOW)) == WINDOW
    assert len(builder(sys.maxsize).completion([5] * 1000)) == 1000
    assert builder(sys.maxsize).encode_chunk(long).tokens


def test_special_tokens_that_cannot_be_written_blame_the_field() -> None:
    built = PromptBuilder(word_level(), context=GenerationContext.ALONE)
    with pytest.raises(InvalidRequestError, match="as plain text") as caught:
        built.token_ids("cat § dog.", param="text")
    assert caught.value.param == "text"
