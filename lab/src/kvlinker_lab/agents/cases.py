"""Asks the requests of all workflows of one system in one store."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvlinker.base.events import ChunkEvicted, Event, EvictionSwap
from kvlinker.doors.client.workflows import Workflow
from kvlinker.quality.bench.harness.subject import MeasuredModel
from kvlinker_lab.agents.scenarios import Turn, Work, random_text

if TYPE_CHECKING:
    from kvlinker.llm import LLM, Answer

SYSTEMS = ("prefix", "marks", "relay", "relay+hints")
"""Prefix reuse alone; documents as chunks, linked naively; answers as chunks, too; and with hints
of what comes next."""

STORES = {"idle": 1.25, "crowded": 1 / 3}
"""The room of the store, as a share of what all workflows need."""

_POLL_SECONDS = 0.002
"""The seconds between two looks whether all chunks ahead are computed."""


@dataclass
class Case:
    """One system in one store, and what became of its requests."""

    system: str
    store: str
    llm: LLM
    runs: list[Iterator[tuple[Turn, Answer]]]
    answers: list[tuple[Turn, Answer]] = field(default_factory=list)
    evicted: int = 0
    spared: int = 0
    ahead: float = 0.0
    """Seconds that chunks were computed ahead, between requests."""

    def ask(self, workflow: int) -> None:
        """Ask the next request of a workflow, and wait until what its hints asked for is there."""
        self.answers.append(next(self.runs[workflow]))
        begin = time.perf_counter()
        while self.llm.agents.preloading.pending:
            time.sleep(_POLL_SECONDS)
        self.ahead += time.perf_counter() - begin


@contextmanager
def open_case(
    subject: MeasuredModel, work: Work, turns: Sequence[Turn], system: str, store: str
) -> Iterator[Case]:
    """Open a system that has answered one prompt already. What its memory evicts is kept nowhere
    else; and the prefixes' pool has room for the longest prompt at least."""
    from kvlinker.service.agents.preloading import SCORE_BYTES

    share = STORES[store]
    longest = 2 * max(map(work.turn_tokens, turns))
    with subject.llm(
        host_memory=int(
            share * work.chunk_tokens(turns) * (subject.loaded.kv_bytes_per_token + SCORE_BYTES)
        ),
        disk_space=0,
        policy=work.policy,
        kv_slots=max(int(share * work.prompt_tokens(turns)), longest),
        prefix_cache="on",
        chunk_scores=False,
    ) as llm:
        case = Case(system, store, llm, [])
        letters = tuple(dict.fromkeys(llm.token_ids("abcdefghijklmnopqrstuvwxyz \n")))
        case.runs = [
            _turns(llm, work, turns, system, number, letters) for number in range(work.workflows)
        ]
        llm.chat_completion([{"role": "user", "content": "Are you there?"}], max_tokens=2)

        def listen(event: Event) -> None:
            case.evicted += isinstance(event, ChunkEvicted)
            case.spared += isinstance(event, EvictionSwap)

        llm.events.subscribe(listen)
        yield case


def _turns(
    llm: LLM,
    work: Work,
    turns: Sequence[Turn],
    system: str,
    number: int,
    letters: tuple[int, ...],
) -> Iterator[tuple[Turn, Answer]]:
    """Yield the answers to a workflow's turns."""
    read = sorted({each for turn in turns for each in turn.documents})
    texts = {each: random_text(work.document_tokens, f"{number} {each}") for each in read}
    flow = Workflow(
        f"flow {number}", {str(place): [str(place + 1)] for place in range(len(turns) - 1)}
    )
    documents: dict[int, Any] = dict(texts)
    if system != "prefix":
        caches = llm.generate_context_cache(list(texts.values()), ttl=3600)
        documents = dict(zip(read, caches, strict=True))
        for place, turn in enumerate(turns):
            flow.uses(str(place), *(documents[each] for each in turn.documents))
    said: list[Any] = []
    for place, turn in enumerate(turns):
        content = [
            *(documents[each] for each in turn.documents),
            *(said[each] for each in turn.hears),
            f"What does {turn.agent} say?",
        ]
        options: dict[str, Any] = {}
        if system.startswith("relay"):
            options["keep"] = "answer"
        if system.endswith("hints"):
            link = flow.link(str(place))
            options |= {"workflow": link["workflow"], "next": link["next"]}
        answer = llm.chat_completion(
            [{"role": "user", "content": content}],
            policy={"prefix": "full", "marks": "naive"}.get(system, work.policy),
            max_tokens=work.answer_tokens,
            ignore_eos=True,
            temperature=1.0,
            seed=place,
            allowed_token_ids=letters,
            **options,
        )
        yield turn, answer
        said.append(_prompt_part(llm, answer))
        if answer.kept is not None and answer.kept.id is not None:
            for later, other in enumerate(turns[place + 1 :], place + 1):
                if place in other.hears:
                    flow.uses(str(later), answer.kept.id)


def _prompt_part(llm: LLM, answer: Answer) -> Any:
    """Return an answer as a part of the next prompt: its context cache, or its text."""
    if answer.kept is None or answer.kept.id is None:
        return answer.text
    return llm.caches.get(answer.kept.id, tenant="default")
