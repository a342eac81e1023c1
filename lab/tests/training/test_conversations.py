"""Training sequences: the chat format, what is learned, and what never occurs."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest
from tokenizers import Tokenizer

from kvlinker_lab.training import prose
from kvlinker_lab.training import vocabulary as words
from kvlinker_lab.training.conversations import ANSWERS, IGNORED, SequenceMaker, TrainingSequence
from kvlinker_lab.training.curriculum import CURRICULUM, Stage
from kvlinker_lab.training.tokenizer import ASSISTANT, BOS, END, PAD
from kvlinker_lab.training.train import batches


def test_sequences_are_full_and_start_with_bos(
    tokenizer: Tokenizer, subtests: pytest.Subtests
) -> None:
    for stage in CURRICULUM:
        with subtests.test(stage.name):
            maker = SequenceMaker(tokenizer, stage.mixture)
            rng = random.Random(0)
            for _ in range(10):
                sequence = maker.make(rng)
                assert len(sequence.ids) == len(sequence.roles) == stage.mixture.length
                assert sequence.ids[0] == BOS
                assert all(
                    role == IGNORED
                    for token, role in zip(*sequence, strict=True)
                    if token in (BOS, PAD)
                )


def conversations(tokenizer: Tokenizer, stage: Stage, count: int) -> list[TrainingSequence]:
    """Sequences of a stage that are neither prose nor repeated segments."""
    mixture = replace(stage.mixture, prose_share=0.0, repeated_share=0.0)
    maker = SequenceMaker(tokenizer, mixture)
    rng = random.Random("conversations")
    return [maker.make(rng) for _ in range(count)]


def test_every_turn_of_the_assistant_is_learned(
    tokenizer: Tokenizer, subtests: pytest.Subtests
) -> None:
    for stage in CURRICULUM:
        with subtests.test(stage.name):
            for ids, roles in conversations(tokenizer, stage, 20):
                starts = [i for i, token in enumerate(ids) if token == ASSISTANT]
                assert starts
                for start in starts:
                    end = ids.index(END, start)
                    assert roles[start] == IGNORED
                    learned = roles[start + 1 : end + 1]
                    if learned[0] == IGNORED:  # the opening that a grammar forces
                        opening = [
                            token
                            for token, role in zip(ids[start + 1 : end], learned, strict=False)
                            if role == IGNORED
                        ]
                        assert re.fullmatch(r'\{"\w+":( ")?', tokenizer.decode(opening))
                        learned = learned[len(opening) :]
                    assert learned[0] in ANSWERS.values()
                    assert len(set(learned)) == 1


def test_batches_follow_from_the_seed(tokenizer: Tokenizer, subtests: pytest.Subtests) -> None:
    for stage in CURRICULUM:
        with subtests.test(stage.name):
            first, again, other = (next(batches(stage, tokenizer, seed, 3)) for seed in (0, 0, 1))
            later = batches(stage, tokenizer, 0, 2)
            next(later)
            assert first.equal(again)
            assert first.equal(next(later))
            assert not first.equal(other)


def test_held_out_people_never_occur(tokenizer: Tokenizer, subtests: pytest.Subtests) -> None:
    name = rf"\b(?:{'|'.join((*words.WOMEN, *words.MEN))}) (?:{'|'.join(words.SURNAMES)})\b"
    for stage in CURRICULUM:
        with subtests.test(stage.name):
            met = 0
            for ids, _ in conversations(tokenizer, stage, 30):
                for full in re.findall(name, tokenizer.decode(ids)):
                    assert not words.is_held_out(full)
                    met += 1
            assert met > 50


def test_held_out_prose_is_apart() -> None:
    held_out = set(prose.held_out_paragraphs())
    assert held_out
    assert held_out.isdisjoint(prose.library_paragraphs())
