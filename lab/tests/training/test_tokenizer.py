"""The reader's tokenizer: any text, whole words of the worlds, and cuts behind line breaks that
change nothing."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer

from kvlinker_lab.training import prose
from kvlinker_lab.training.questions import WorldSettings
from kvlinker_lab.training.tokenizer import BOS, SPECIAL_TOKENS, VOCABULARY_SIZE
from kvlinker_lab.training.vocabulary import WORLD_WORDS
from kvlinker_lab.training.worlds import build_world


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def test_world_words_are_single_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() <= VOCABULARY_SIZE
    assert tokenizer.token_to_id(SPECIAL_TOKENS[BOS]) == BOS
    for text in (*WORLD_WORDS, *(" " + word for word in WORLD_WORDS)):
        assert len(ids_of(tokenizer, text)) == 1


@pytest.mark.parametrize(
    "text", ["", "naïve Ünïcode 漢字 🙂\t x\r\n", "a  b\n\n\n c  \n", "12345 6.7"]
)
def test_any_text_survives(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(ids_of(tokenizer, text), skip_special_tokens=False) == text


def test_passages_tokenise_alone_as_in_context(tokenizer: Tokenizer) -> None:
    rng = random.Random(0)
    for _ in range(50):
        world = build_world(rng, WorldSettings(), 200)
        chunks = [passage + "\n\n" for passage in [*world.passages, prose.paragraph(rng)]]
        alone = [ids_of(tokenizer, chunk) for chunk in chunks]
        assert [token for ids in alone for token in ids] == ids_of(tokenizer, "".join(chunks))
