import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.types.chunks import Chunk, GenerationContext
from kvlinker.prompting.builder import PromptBuilder
from kvlinker.prompting.segments import CachedSegment, FreshSegment
from tests.properties import examples
from tests.toy_tokenizers import byte_level, metaspace, word_level

ALONE, BOS, PREFIX = GenerationContext
TOKENIZERS = [
    byte_level(),
    byte_level(bos=False),
    metaspace("first"),
    metaspace("prepend"),
    word_level(),
]


def builder(
    tokenizer: PreTrainedTokenizerFast | None = None, context: GenerationContext = ALONE
) -> PromptBuilder:
    return PromptBuilder(tokenizer or byte_level(), context=context)


def encoded(text: str) -> tuple[int, ...]:
    return tuple(byte_level()(text, add_special_tokens=False)["input_ids"])


BAD_IDS: list[list[Any]] = [[], [-1], [10**6], [True], [1.0], ["1"], [None]]


class TestChunks:
    def test_alone(self) -> None:
        assert builder().encode_chunk("the cat") == Chunk(encoded("the cat"))

    def test_bos_is_the_first_token(self) -> None:
        assert builder(context=BOS).encode_chunk("the cat") == Chunk(
            (byte_level().bos_token_id, *encoded("the cat"))
        )

    def test_prefix_without_a_template_is_what_completions_begin_with(self) -> None:
        built = builder(context=PREFIX)
        chunk = built.encode_chunk("the cat")
        assert chunk == Chunk(encoded("the cat"), prefix=(byte_level().bos_token_id,))
        assert built.completion((chunk, "sat")).spans[0].exact

    def test_a_chunk_may_choose_its_context(self) -> None:
        assert builder(context=BOS).encode_chunk("the cat", ALONE) == builder().encode_chunk(
            "the cat"
        )
        bos = byte_level().bos_token_id
        assert builder().encode_chunk("the cat", BOS) == Chunk((bos, *encoded("the cat")))

    def test_special_tokens_in_documents_are_text(self) -> None:
        tokens = builder().encode_chunk("a<|end|><s>").tokens
        assert not set(tokens) & set(byte_level().all_special_ids)

    @pytest.mark.parametrize("text", ["", "\ud800", "a\udc00b"])
    def test_errors(self, text: str) -> None:
        with pytest.raises(InvalidRequestError) as caught:
            builder(context=BOS).encode_chunk(text)
        assert caught.value.param == "chunks"

    def test_text_that_the_tokenizer_does_not_see_is_empty(self) -> None:
        with pytest.raises(InvalidRequestError, match="chunk is empty"):
            builder(word_level(), BOS).encode_chunk(" \n")

    def test_bad_token_ids(self, subtests: pytest.Subtests) -> None:
        for ids in BAD_IDS:
            with subtests.test(ids=ids):
                with pytest.raises(InvalidRequestError) as caught:
                    builder().checked_ids(ids, param="prompt")
                assert caught.value.param == "prompt"

    def test_bos_context_needs_a_bos_token(self) -> None:
        with pytest.raises(InvalidRequestError, match="no BOS token") as caught:
            builder(byte_level(bos=False), BOS).encode_chunk("the cat")
        assert caught.value.param == "context"


BAD_PROMPTS: list[tuple[str | Sequence[Any], str]] = [
    ("", "empty"),
    ([], "no token ids"),
    (["", ""], "empty"),
    ("a\ud800", "lone surrogate"),
    (["a", "\udfff"], "lone surrogate"),
    ([1, -1], "not -1"),
    ([10**6], "not 1000000"),
    ([len(byte_level())], f"from 0 to {len(byte_level()) - 1}"),
    ([1, True], "not True"),
    ([1.5], "not 1.5"),
    (["a", 1], "not both"),
    ([Chunk((7,)), 1], "not both"),
]


class TestCompletions:
    @examples(60)
    @given(
        st.lists(st.sampled_from([*"ab c\né😀", "the cat", "<|end|>", "</s>"]), min_size=1).map(
            "".join
        )
    )
    def test_text_alone_gives_what_the_tokenizer_gives(self, text: str) -> None:
        for tokenizer in TOKENIZERS:
            if expected := tokenizer(text)["input_ids"]:
                assert builder(tokenizer).completion(text).tokens.tolist() == expected
                assert (
                    builder(tokenizer).completion([text[:1], text[1:]]).tokens.tolist() == expected
                )

    def test_token_ids_are_taken_as_they_are(self) -> None:
        last = len(byte_level()) - 1
        assert builder().completion([0, last, 7]).segments == (FreshSegment((0, last, 7)),)

    @pytest.mark.parametrize("context", [ALONE, BOS, PREFIX])
    def test_bos_stands_once_and_first(self, context: GenerationContext) -> None:
        bos = byte_level().bos_token_id
        built = builder(context=context)
        chunk = built.encode_chunk("the cat")
        for prompt in (built.completion((chunk, " sat")), built.completion(("", chunk))):
            assert prompt.tokens[0] == bos
            assert prompt.tokens.tolist().count(bos) == 1
            assert prompt.chunks == (chunk,)

    def test_a_first_chunk_with_bos_is_exact(self) -> None:
        built = builder(context=BOS)
        assert built.completion((built.encode_chunk("the cat"), " sat")).spans[0].exact

    def test_later_text_gets_no_bos_and_no_space(self) -> None:
        tokenizer = metaspace("first")
        built = builder(tokenizer)
        chunk = built.encode_chunk("cat")
        prompt = built.completion(("the", chunk, "sat", " ", "on", chunk))
        shown = [
            tokenizer.convert_ids_to_tokens(list(segment.tokens)) for segment in prompt.segments
        ]
        assert ["".join(tokens) for tokens in shown] == ["<s>▁the", "▁cat", "sat▁on", "▁cat"]

    def test_many_parts_take_linear_time(self) -> None:
        """By appending, 100,000 parts took eight seconds, and 400,000 a hundred."""
        built, parts = builder(), ["hello "] * 100_000
        start = time.thread_time()
        prompt = built.completion(parts)
        assert time.thread_time() - start < 4
        assert prompt.tokens.tolist() == built.completion("hello " * 100_000).tokens.tolist()

    @examples(60)
    @given(st.lists(st.sampled_from(["", " ", "the", "<s>", 0, 1]), min_size=1, max_size=8))
    def test_chunks_stand_anywhere(self, parts: list[str | int]) -> None:
        built = builder()
        chunks = [built.encode_chunk("A document."), built.encode_chunk("😀", BOS)]
        if not any(isinstance(part, int) or part for part in parts):
            return
        prompt = built.completion(
            [chunks[part] if isinstance(part, int) else part for part in parts]
        )
        assert prompt.chunks == tuple(chunks[part] for part in parts if isinstance(part, int))
        for chunk, span in zip(prompt.chunks, prompt.spans, strict=True):
            assert tuple(prompt.tokens[span.start : span.end].tolist()) == chunk.tokens
        fresh = [isinstance(segment, FreshSegment) for segment in prompt.segments]
        assert not any(a and b for a, b in pairwise(fresh))
        text = "".join(part for part in parts if isinstance(part, str))
        decoded = byte_level().decode(
            [token for s in prompt.segments for token in s.tokens if is_fresh(s)]
        )
        assert decoded.removeprefix("<s>") in (text, text.removeprefix("<s>"))

    def test_errors(self, subtests: pytest.Subtests) -> None:
        for prompt, message in BAD_PROMPTS:
            with subtests.test(prompt=prompt):
                with pytest.raises(InvalidRequestError, match=message) as caught:
                    builder().completion(prompt)
                assert caught.value.param == "prompt"


def is_fresh(segment: FreshSegment | CachedSegment) -> bool:
    return isinstance(segment, FreshSegment)
