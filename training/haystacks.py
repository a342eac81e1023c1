"""Worlds of prose in which a few sentences state facts."""

from __future__ import annotations

from training import prose
from training.entities import Cast
from training.questions import Question, World
from training.relations import PERSON_RELATIONS


def haystack(cast: Cast, word_budget: int) -> World:
    """About `word_budget` words of prose with needles in it."""
    rng, settings = cast.rng, cast.settings
    count = min(rng.randint(*settings.needles), max(1, word_budget // 20))
    passages: list[list[str]] = []
    length = 0
    while length < word_budget or not passages:
        sentences = [prose.filler_sentence(rng, settings.library_share) for _ in range(rng.randint(2, 7))]
        passages.append(sentences)
        length += sum(sentence.count(" ") + 1 for sentence in sentences)
    relations = rng.sample(PERSON_RELATIONS, rng.randint(1, 3))
    questions: list[Question] = []
    for _ in range(count):
        person, relation = cast.person(), rng.choice(relations)
        value = cast.value(relation)
        sentences = rng.choice(passages)
        sentences.insert(rng.randint(0, len(sentences)), cast.statement(person.name, relation, value))
        cloze = relation.statements[0].split(" {v}")[0].format(s=person.name)
        questions.append(Question(cast.question(person, relation), value, "needle", cloze))
    return World([" ".join(sentences) for sentences in passages], questions)
