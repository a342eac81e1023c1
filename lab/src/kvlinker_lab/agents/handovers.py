"""Makes hand-overs of the reader's questions: some passages are said by other agents, whose answers
are kept, and the question needs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlinker.base.types.grammars import AnswerGrammar
from kvlinker.base.types.tenants import DEFAULT_TENANT
from kvlinker.linking import Policy, highest, share
from kvlinker.linking.evidence import Evidence
from kvlinker.llm import LLM, Message
from kvlinker.prompting.segments import Prompt
from kvlinker.quality.evaluation.examiner import QuestionTrial
from kvlinker.quality.evaluation.examples import REFERENCE, Question, Result
from kvlinker.store import ContextCache
from kvlinker_lab.inspection import EngineInspector, relative_kv_distance

EVERY = 3
"""The number of passages of which another agent says one. Chosen by hand."""

ANY = "What is to be known of it?"
"""The question to the other agents."""

PERCENT = 5.0
"""The share of cached tokens that are computed again, by whatever they are chosen."""

RELAY, ELSEWHERE = "relay", "relay elsewhere"

WAYS: Mapping[str, tuple[str, ...]] = {
    "marks": ("naive", "legolink-4", "query-5"),
    RELAY: ("naive", "legolink-4", "query-5", "apart-5", "deviating-5"),
    ELSEWHERE: ("naive", "legolink-4", "query-5", "apart-5", "deviating-5"),
    "clean": ("naive", "legolink-4", "query-5"),
}
"""The forms of other agents' answers in the prompt, and the policies of each: as text; with the KV
that decoding computed, behind the same prompt or behind another question's passages; or computed
alone.

Two policies choose the tokens that deviate most: ``apart`` compares the kept KV with that of the
same text computed alone, which a server could know. ``deviating`` compares it with that of this
very prompt in full, which no server can know: an upper bound.
"""


class MostDeviating(Policy):
    """Computes the r percent of the cached tokens with the highest given scores again. It is made
    for one prompt."""

    family = "most-deviating"

    percent: float
    scores: tuple[float, ...]
    """Scores of the prompt's tokens, up to the end of its chunks."""

    @property
    def name(self) -> str:
        return self.family

    def __post_init__(self) -> None:
        """Check nothing: there is no name to be read."""

    def select(self, prompt: Prompt, evidence: Evidence) -> NDArray[np.bool_]:
        scores = np.zeros(len(prompt))
        scores[: len(self.scores)] = self.scores[: len(prompt)]
        count = share(self.percent, int(prompt.inexact.sum()))
        return highest(scores, count, among=prompt.inexact)


@dataclass(frozen=True)
class Handovers:
    """Asks questions of a model whose requests reuse no prefixes, and recognise no texts."""

    llm: LLM
    inspector: EngineInspector
    ways: Sequence[str] = tuple(WAYS)
    """The names in ``WAYS`` that are measured."""

    def ask(self, example: Question, other: Question) -> dict[str, Result]:
        """Return the answers to a question in all ways and under all policies, by names such as
        ``relay query-5``; none where another agent's answer is not sampled in the tokens of its
        text. ``other`` is what the agents of ``relay elsewhere`` had read."""
        passages = list(self.llm.generate_context_cache(list(example.passages)))
        contents: dict[str, list[Any]] = {way: list(passages) for way in WAYS}
        said = range(1, len(passages), EVERY)
        agents = [
            (way, place, (example.passages[:place] if way == RELAY else other.passages))
            for place in said
            for way in (RELAY, ELSEWHERE)
            if way in self.ways
        ]
        with ThreadPoolExecutor() as at_once:
            kept = list(at_once.map(lambda agent: self._say(agent[2], passages[agent[1]]), agents))
        for (way, place, _), answer in zip(agents, kept, strict=True):
            if answer is None:
                return {}
            contents[way][place] = answer
        for place in said:
            contents["marks"][place] = example.passages[place]
        trials = {way: self._trial(example, contents[way]) for way in self.ways}
        full = self._trial(example, contents["marks"]).run(REFERENCE)
        answers = {REFERENCE: full.compare(full, example, REFERENCE)}
        for way in self.ways:
            found = self._deviation_policies(contents, way) if way in (RELAY, ELSEWHERE) else {}
            for policy in WAYS[way]:
                name = f"{way} {policy}"
                run = trials[way].run(found.get(policy, policy))
                answers[name] = run.compare(full, example, name)
        return answers

    def _trial(self, example: Question, content: Sequence[Any]) -> QuestionTrial:
        return QuestionTrial.of(example, self.llm, _messages(content, example.question))

    def _say(self, read: Sequence[str], passage: ContextCache) -> ContextCache | None:
        """Return the kept answer of an agent that has read these texts, computed as they are, and
        says a passage; None where the answer is not sampled in the tokens of the passage."""
        answer = self.llm.chat_completion(
            _messages(["".join(read)], ANY),
            policy=REFERENCE,
            grammar=AnswerGrammar.choice((self.llm.decode_ids(passage.chunk.tokens),)),
            max_tokens=len(passage.chunk) + 1,
            temperature=0,
            keep="answer",
        )
        if answer.kept is None or answer.kept.id is None:
            return None
        found = self.llm.caches.get(answer.kept.id, tenant=DEFAULT_TENANT)
        return found if found.chunk.tokens == passage.chunk.tokens else None

    def _deviation_policies(
        self, contents: Mapping[str, Sequence[Any]], way: str
    ) -> dict[str, Policy]:
        """Return the policies that choose what deviates most in a prompt."""
        messages = _messages(contents[way], "?")
        kept = self.inspector.inspect(messages, "naive")
        alone = self.inspector.inspect(_messages(contents["clean"], "?"), "naive")
        whole = self.inspector.inspect(messages, REFERENCE)
        return {
            f"{name}-{PERCENT:g}": MostDeviating(
                PERCENT, tuple(relative_kv_distance(reference, kept).mean(axis=0).tolist())
            )
            for name, reference in (("apart", alone), ("deviating", whole))
        }


def _messages(content: Sequence[Any], question: str) -> list[Message]:
    return [{"role": "user", "content": [*content, question]}]
