import copy
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from kvlinker.base.errors import InvalidRequestError
from kvlinker.prompting import encoding
from kvlinker.prompting.encoding import TextEncoder, require_unicode
from tests.properties import examples
from tests.toy_tokenizers import byte_level, metaspace, unigram, word_level

SPACED = ["first", "always", "prepend"]


def tokens(tokenizer: PreTrainedTokenizerFast, ids: tuple[int, ...]) -> list[str]:
    return tokenizer.convert_ids_to_tokens(list(ids))


def test_special_tokens_in_data_are_text(subtests: pytest.Subtests) -> None:
    tokenizers = {"bytes": byte_level(), "words": metaspace(), "prepended": metaspace("prepend")}
    texts = ["<s>", "a <|end|> b", "</s></s>", "the <|start|>user\nsystem", "<s"]
    for (name, tokenizer), text in product(tokenizers.items(), texts):
        with subtests.test(name, text=text):
            ids = TextEncoder(tokenizer).encode_data(text)
            assert not set(ids) & set(tokenizer.all_special_ids)
            assert tokenizer.decode(list(ids)) == text


def test_other_added_tokens_stay_tokens_in_data() -> None:
    tokenizer = byte_level()
    assert tokenizer.convert_tokens_to_ids("<think>") in TextEncoder(tokenizer).encode_data(
        "a<think>b"
    )


def test_special_tokens_that_the_vocabulary_itself_yields_are_taken_apart() -> None:
    tokenizer = word_level()
    encoder = TextEncoder(tokenizer)
    assert tokens(tokenizer, encoder.encode_data("cat </s> dog.")) == [
        "cat",
        "<unk>",
        "<unk>",
        "dog.",
    ]
    assert encoder.count_data(["cat </s> dog.", "cat"]) == [4, 1]


@pytest.mark.parametrize("text", ["cat </s> dog", "cat ＜/s＞ dog", "cat </S> dog", "＜s＞"])
def test_special_tokens_that_normalised_text_spells_are_taken_apart(text: str) -> None:
    tokenizer = unigram()
    encoder = TextEncoder(tokenizer)
    assert not set(encoder.encode_data(text)) & set(tokenizer.all_special_ids)
    assert tokens(tokenizer, encoder.encode_data("🐟")) == ["▁", "<unk>"], "which nothing spells"


def test_special_tokens_that_have_no_other_spelling_are_refused() -> None:
    encoder = TextEncoder(word_level())
    with pytest.raises(InvalidRequestError, match="special token '§' as plain text"):
        encoder.encode_data("cat § dog.")


@examples(60)
@given(st.lists(st.text(max_size=20), max_size=5))
def test_counts_are_the_lengths_of_the_encodings(texts: list[str]) -> None:
    for tokenizer in (byte_level(), metaspace()):
        encoder = TextEncoder(tokenizer)
        assert encoder.count_data(texts) == [len(encoder.encode_data(text)) for text in texts]


@examples(60)
@given(st.text(max_size=20))
def test_texts_of_tokens_are_the_whole_text(text: str) -> None:
    for tokenizer in (byte_level(), metaspace()):
        encoder = TextEncoder(tokenizer)
        ids = encoder.encode_prompt(f"<s>{text}")
        texts = encoder.token_texts(ids)
        assert len(texts) == len(ids)
        assert "".join(texts) == tokenizer.decode(ids)


def test_half_a_character_at_the_end_is_told_as_such() -> None:
    encoder = TextEncoder(byte_level())
    ids = encoder.encode_prompt("naïve 🐟")
    assert encoder.token_texts(ids[:-1])[-1].endswith("\ufffd")
    assert encoder.token_texts(()) == []


@examples(60)
@given(st.text(min_size=1, max_size=30))
def test_token_starts_ascend_from_the_first_character(text: str) -> None:
    for tokenizer in (byte_level(), metaspace("prepend")):
        encoder = TextEncoder(tokenizer)
        starts = encoder.token_starts(text)
        assert starts == sorted(starts)
        assert starts[0] == 0
        assert starts[-1] < len(text)
        assert len(starts) == len(encoder.encode_data(text))


def test_prompts_are_encoded_as_the_tokenizer_does() -> None:
    for tokenizer in (
        byte_level(),
        byte_level(add_prefix_space=True),
        *map(metaspace, SPACED),
        word_level(),
    ):
        for text in ("Hello world", " a cat", "<s>the cat</s> sat", "dog.\n\nnew é 😀"):
            expected = tokenizer(text, add_special_tokens=False)["input_ids"]
            assert list(TextEncoder(tokenizer).encode_prompt(text)) == expected


@pytest.mark.parametrize("kind", SPACED)
def test_no_space_before_text_that_continues(kind: str) -> None:
    tokenizer = metaspace(kind)
    encoder = TextEncoder(tokenizer)
    assert tokens(tokenizer, encoder.encode_prompt("cat sat"))[0].startswith("▁")
    for text in ("cat sat", "small text</s>", "\nmore"):
        continued = encoder.encode_prompt(text, continued=True)
        assert "".join(tokens(tokenizer, continued)).replace("<0x0A>", "\n") == text.replace(
            " ", "▁"
        )


@pytest.mark.parametrize("kind", SPACED)
def test_text_that_continues_is_as_in_context_after_its_first_special_token(kind: str) -> None:
    tokenizer = metaspace(kind)
    encoder = TextEncoder(tokenizer)
    tail = "</s>the dog. </s> and"
    whole = encoder.encode_prompt("a cat" + tail)
    end = whole.index(tokenizer.eos_token_id)
    continued = encoder.encode_prompt("cat" + tail, continued=True)
    assert continued[continued.index(tokenizer.eos_token_id) :] == whole[end:]
    assert encoder.encode_prompt(tail, continued=True) == whole[end:]


@pytest.mark.parametrize("tokenizer", [byte_level(), metaspace("never"), word_level()])
def test_tokenizers_without_a_leading_space_need_no_care(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    encoder = TextEncoder(tokenizer)
    assert encoder.encode_prompt("cat sat", continued=True) == encoder.encode_prompt("cat sat")


def test_byte_level_prefix_space_is_left_out_of_text_that_continues() -> None:
    tokenizer = byte_level(add_prefix_space=True)
    encoder = TextEncoder(tokenizer)
    assert encoder.encode_prompt("cat", continued=True) == TextEncoder(byte_level()).encode_prompt(
        "cat"
    )
    assert encoder.encode_prompt("cat") == encoder.encode_prompt(" cat")


def test_what_the_tokenizer_puts_around_prompts() -> None:
    assert TextEncoder(byte_level()).opening == (byte_level().bos_token_id,)
    assert TextEncoder(byte_level(bos=False)).opening == ()
    assert TextEncoder(byte_level()).closing == ()


def test_vocab_size_counts_added_tokens() -> None:
    tokenizer = byte_level()
    assert (
        TextEncoder(tokenizer).vocab_size
        == len(tokenizer)
        == tokenizer.convert_tokens_to_ids("<think>") + 1
    )


def test_others_may_use_and_change_the_tokenizer_meanwhile() -> None:
    tokenizer = byte_level()
    encoder = TextEncoder(tokenizer)
    text = "the <|end|> of a cat " * 20
    as_data, as_prompt = encoder.encode_data(text), encoder.encode_prompt(text)

    def disturb(i: int) -> None:
        tokenizer(text, truncation=True, max_length=3 + i % 2, split_special_tokens=bool(i % 2))
        tokenizer(text, padding="max_length", max_length=999)

    with ThreadPoolExecutor(4) as pool:
        disturbances = [pool.submit(disturb, i) for i in range(20)]
        results = [
            pool.submit(lambda: (encoder.encode_data(text), encoder.encode_prompt(text)))
            for _ in range(40)
        ]
        assert {result.result() for result in results} == {(as_data, as_prompt)}
        for disturbance in disturbances:
            disturbance.result()


@pytest.mark.parametrize("text", ["\ud800", "a\udfff", "\ud83d\ude00"])
def test_lone_surrogates_are_refused(text: str) -> None:
    with pytest.raises(
        InvalidRequestError, match=r"lone surrogate U\+D[8-F][0-9A-F]{2} at character [01]"
    ) as caught:
        require_unicode(text, param="prompt")
    assert caught.value.param == "prompt"


def test_all_other_unicode_passes() -> None:
    require_unicode("\0\uffff\U0010ffff😀", param="prompt")


def test_copies_share_the_vocabulary_and_nothing_else() -> None:
    tokenizer = copy.deepcopy(byte_level())
    tokenizer.add_special_tokens({"additional_special_tokens": ["<one>"]})
    tokenizer.add_tokens(["plain"])
    backend = tokenizer.backend_tokenizer
    backend.no_padding()
    backend.no_truncation()
    made = encoding._copy(backend)
    assert made.to_str() == backend.to_str()
    backend.enable_truncation(1)
    made.normalizer = None
    assert made.truncation is None
    assert (
        made.encode("<one> and plain").tokens
        == copy.deepcopy(made).encode("<one> and plain").tokens
    )
