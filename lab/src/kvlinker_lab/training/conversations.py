"""Makes training sequences: token ids and what is learned at each position.

A conversation has the format of the chat template. The first user turn of a context holds passages,
each tokenised by itself as a chunk cache would, then a question; further questions follow in
further turns, and later turns may bring passages of another world. Called by `train`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tokenizers import Tokenizer

from kvlinker.base.types.messages import ChatMessage
from kvlinker.prompting.chat import Message
from kvlinker_lab.training import prose
from kvlinker_lab.training.calls import Desk
from kvlinker_lab.training.questions import ALL_KINDS, Kind, Question, World, WorldSettings
from kvlinker_lab.training.tokenizer import (
    ASSISTANT,
    BOS,
    END,
    PAD,
    SPECIAL_TOKENS,
    SYSTEM,
    USER,
    VOCABULARY_SIZE,
)
from kvlinker_lab.training.vocabulary import WORLD_WORDS
from kvlinker_lab.training.worlds import build_world

IGNORED, LANGUAGE, ANSWER = 0, 1, 2
"""Roles of a token in the loss: none, language modelling, or an answer to no question of any
kind."""

ANSWERS = {kind: ANSWER + 1 + i for i, kind in enumerate(ALL_KINDS)}
"""Roles of answers to questions of a kind; all answers are `ANSWER` or above."""

SYSTEM_PROMPTS = (
    "Answer the question from the passages.",
    "Read the passages and answer with a few words.",
    "You are a helpful assistant.",
    "You are a careful reader. Answer briefly.",
    "Use the documents below to answer.",
    "You answer questions about the given context.",
)

_READ_SHARE = 0.3  # of turns with tools at hand: they are about a passage
"""The share of questions about passages; the others need a tool."""

_INSTRUCTIONS = ("Context:\n\n", "Passages:\n\n", "Read the following passages.\n\n")


class TrainingSequence(NamedTuple):
    """Holds token ids and their roles (`IGNORED`, `LANGUAGE`, `ANSWER` or one of `ANSWERS`), both
    `length` long."""

    ids: list[int]
    roles: list[int]


@dataclass(frozen=True)
class Mixture:
    """Describes what a stage of training reads; shares are probabilities per sequence."""

    length: int
    worlds: WorldSettings
    prose_share: float = 0.2
    repeated_share: float = 0.0
    inner_bos_share: float = 0.4
    recap_share: float = 0.0
    """The share of contexts that end with some of their facts in other words: "To sum up, ..."."""
    call_share: float = 0.0
    """The share of conversations with tools."""
    loose_share: float = 0.0
    """The share of contexts whose passages end with a single line break instead of an empty
    line."""
    context_share: tuple[float, float] = (0.3, 0.75)
    """Bounds of the passages' share of the sequence; smaller ones leave room for a second
    context."""


class SequenceMaker:
    """Makes sequences of one mixture; equal random states give equal sequences."""

    def __init__(self, tokenizer: Tokenizer, mixture: Mixture) -> None:
        self.tokenizer = tokenizer
        self.mixture = mixture
        vocabulary = tokenizer.get_vocab()
        self.words = [vocabulary["Ġ" + word] for word in WORLD_WORDS]

    def make(self, rng: random.Random) -> TrainingSequence:
        """Make one sequence of exactly `mixture.length` tokens, padded where nothing more fits."""
        mixture = self.mixture
        draw = rng.random()
        if draw < mixture.prose_share:
            ids, roles = self._prose(rng)
        elif draw < mixture.prose_share + mixture.repeated_share:
            ids, roles = self._repeat(rng)
        elif rng.random() < mixture.call_share:
            ids, roles = self._calls(rng)
        else:
            ids, roles = self._conversation(rng)
        missing = mixture.length - len(ids)
        return TrainingSequence(ids + [PAD] * missing, roles + [IGNORED] * missing)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text by itself, without special tokens around it."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _prose(self, rng: random.Random) -> tuple[list[int], list[int]]:
        ids = [BOS]
        inner = rng.random() < self.mixture.inner_bos_share
        while len(ids) < self.mixture.length:
            if inner and rng.random() < 0.5:
                ids.append(BOS)
            ids += self.encode(prose.paragraph(rng) + "\n\n")
        ids = ids[: self.mixture.length]
        return ids, [IGNORED if token == BOS else LANGUAGE for token in ids]

    def _repeat(self, rng: random.Random) -> tuple[list[int], list[int]]:
        """Make segments that recur; only the recurrences are learned, as if they were answers.

        A sequence has segments of prose, of world words, or of any tokens.
        """
        length = self.mixture.length
        ids, roles = [BOS], [IGNORED]
        draw = rng.random()
        while len(ids) < length:
            size = rng.randint(4, 24)
            if draw < 0.6:
                text = self.encode(prose.paragraph(rng))
                start = rng.randrange(max(1, len(text) - size))
                segment = text[start : start + size]
            elif draw < 0.9:
                segment = [rng.choice(self.words) for _ in range(size)]
            else:
                segment = [rng.randrange(len(SPECIAL_TOKENS), VOCABULARY_SIZE) for _ in range(size)]
            for repeat in range(rng.randint(2, 4)):
                ids += segment
                roles += [ANSWER if repeat and i else IGNORED for i in range(len(segment))]
        return ids[:length], roles[:length]

    def _conversation(self, rng: random.Random) -> tuple[list[int], list[int]]:
        """Make contexts with questions until the sequence is full."""
        length = self.mixture.length
        ids, roles = [BOS], [IGNORED]
        if rng.random() < 0.4 and length >= 200:
            system = [SYSTEM, *self.encode(rng.choice(SYSTEM_PROMPTS)), END]
            ids += system
            roles += [IGNORED] * len(system)
        inner = rng.random() < self.mixture.inner_bos_share
        while True:
            room = length - len(ids)
            budget = int(room * rng.uniform(*self.mixture.context_share))
            world = build_world(rng, self.mixture.worlds, int((budget - 20) / 1.45))
            context, context_roles = self._context(rng, world, inner)
            if len(context) > room - 30:
                if len(roles) < 0.8 * length:
                    continue
                return ids, roles
            ids += context
            roles += context_roles
            first = True
            labelled = rng.random() < 0.6
            questions = rng.sample(world.questions, len(world.questions))
            if rng.random() < self.mixture.recap_share and len(questions) > 2:
                half = len(questions) // 2
                recap, recap_roles = self._recap(questions[:half])
                questions = questions[half:]
                if len(ids) + len(recap) + 30 < length:
                    ids += recap
                    roles += recap_roles
            for question in questions:
                text = ("Question: " if labelled else "") + question.text
                asked = [END, ASSISTANT] if first else [USER, END, ASSISTANT]
                asked[-2:-2] = self.encode(text)
                forced = self.encode(question.opening)
                answer = [*self.encode(question.answer[len(question.opening) :]), END]
                if len(ids) + len(asked) + len(forced) + len(answer) > length:
                    continue
                ids += asked + forced + answer
                roles += [IGNORED] * (len(asked) + len(forced)) + [ANSWERS[question.kind]] * len(
                    answer
                )
                first = False
            if length - len(ids) < max(64, length // 8):
                return ids, roles

    def _calls(self, rng: random.Random) -> tuple[list[int], list[int]]:
        """Make a conversation about what tools tell, sometimes about a passage, too, until the
        sequence is full."""
        length = self.mixture.length
        ids, roles = [BOS], [IGNORED]
        while True:
            desk = Desk(rng)
            messages: list[Message] = []
            if rng.random() < 0.7:
                messages.append(ChatMessage("system", (rng.choice(SYSTEM_PROMPTS),)))
            kinds: list[Kind] = []
            for _ in range(rng.randint(1, 4)):
                if rng.random() < _READ_SHARE:
                    world = build_world(
                        rng, replace(self.mixture.worlds, themes={}), rng.randint(10, 60)
                    )
                    question = rng.choice(world.questions)
                    text = (
                        "".join(f"{passage}\n\n" for passage in world.passages)
                        + f"Question: {question.text}"
                    )
                    messages += [
                        ChatMessage("user", (text,)),
                        ChatMessage("assistant", (question.answer,)),
                    ]
                    kinds.append(question.kind)
                else:
                    messages += desk.exchange().messages
                    kinds += ["call", "call"]
            said, learned = self._messages(desk.texts(messages), kinds)
            if len(ids) + len(said) > length:
                if len(ids) > 0.6 * length:
                    return ids, roles
                continue
            ids += said
            roles += learned

    def _messages(
        self, texts: Sequence[tuple[str, str]], kinds: Sequence[Kind]
    ) -> tuple[list[int], list[int]]:
        """Make turns of texts with their roles; the assistant's answer questions of these kinds, in
        order."""
        ids: list[int] = []
        roles: list[int] = []
        answer_kinds = iter(kinds)
        for role, text in texts:
            said = [*self.encode(text), END]
            ids += [{"system": SYSTEM, "user": USER, "assistant": ASSISTANT}[role], *said]
            roles += [
                IGNORED,
                *[ANSWERS[next(answer_kinds)] if role == "assistant" else IGNORED] * len(said),
            ]
        return ids, roles

    def _recap(self, questions: list[Question]) -> tuple[list[int], list[int]]:
        """Make a passage that states facts again; their values are learned as answers."""
        ids = self.encode("To sum up:")
        roles = [IGNORED] * len(ids)
        for question in questions:
            if question.cloze:
                stated, value = (
                    self.encode(f" {question.cloze}"),
                    self.encode(f" {question.answer}"),
                )
                ids += [*stated, *value, *self.encode(".")]
                roles += [IGNORED] * len(stated) + [ANSWER] * len(value) + [IGNORED]
        end = self.encode("\n\n")
        return ids + end, roles + [IGNORED] * len(end)

    def _context(
        self, rng: random.Random, world: World, inner: bool
    ) -> tuple[list[int], list[int]]:
        """Make an open user turn with the passages of a world."""
        ids, roles = [USER], [IGNORED]
        if rng.random() < 0.2:
            ids += self.encode(rng.choice(_INSTRUCTIONS))
            roles += [IGNORED] * (len(ids) - 1)
        loose = self.mixture.loose_share
        separator = "\n" if loose and rng.random() < loose else "\n\n"
        for passage in world.passages:
            if inner and rng.random() < 0.5:
                ids.append(BOS)
                roles.append(IGNORED)
            chunk = self.encode(passage + separator)
            ids += chunk
            roles += [LANGUAGE] * len(chunk)
        return ids, roles
