"""Measures hand-overs between agents: what one writes is in the next one's prompt, in a store that
has room for everything, or for a third of it."""

from __future__ import annotations

import random
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvlinker.base.events import ChunkEvicted, ChunkSpared, Event
from kvlinker.doors.client.workflows import Workflow
from kvlinker.quality.bench.harness.benchmark import Setup, benchmark
from kvlinker.quality.bench.harness.report import Report, Row
from kvlinker.quality.bench.harness.subject import MeasuredModel
from kvlinker.quality.libraries import bench_library
from kvlinker.quality.progress import Progress, silent

if TYPE_CHECKING:
    from kvlinker.llm import LLM, Answer

COLUMNS = (
    "scenario",
    "system",
    "store",
    "n",
    "ttft_ms",
    "vs_marks",
    "recomputed",
    "slow",
    "spared",
)
SYSTEMS = ("prefix", "marks", "relay", "relay+hints")
CROWDED = 1 / 3
"""The share of what all workflows need that a crowded store has room for."""

SLO = 2.0
"""A first token is slow that takes so many times the idle median of the marks."""


@dataclass(frozen=True)
class Turn:
    """One request: which documents the agent reads, and whose answers, by their turns' numbers."""

    agent: str
    documents: tuple[int, ...] = ()
    hears: tuple[int, ...] = ()


def _debate(rounds: int = 2, agents: int = 4) -> tuple[Turn, ...]:
    first = [Turn(f"debater {number}", (0, 1)) for number in range(agents)]
    later = [
        Turn(f"debater {number}", (0, 1), tuple(range((round - 1) * agents, round * agents)))
        for round in range(1, rounds)
        for number in range(agents)
    ]
    return (*first, *later)


SCENARIOS: Mapping[str, tuple[Turn, ...]] = {
    "planner": (
        Turn("planner", (0, 1, 2, 3)),
        Turn("worker 1", (0, 1), (0,)),
        Turn("worker 2", (2, 3), (0,)),
        Turn("worker 3", (3, 0), (0,)),
        Turn("planner again", (), (0, 1, 2, 3)),
    ),
    "debate": _debate(),
    "tools": (
        Turn("retriever", (0,)),
        Turn("reader", (1, 2, 3), (0,)),
        Turn("answerer", (3, 1), (0, 1)),
    ),
}
"""The turns of each workflow, in order."""


@benchmark("agents", plot=lambda rows, path: plot(rows, path))
def agents(
    setup: Setup,
    *,
    workflows: Annotated[int, typer.Option(min=1, help="Workflows that take turns.")] = 3,
    document_tokens: Annotated[int, typer.Option(min=32, help="Tokens per document.")] = 256,
    answer_tokens: Annotated[int, typer.Option(min=8, help="Tokens per answer.")] = 24,
    pause: Annotated[float, typer.Option(min=0, help="Seconds between two requests.")] = 0.3,
    policy: Annotated[str, typer.Option(help="How chunks are linked.")] = "legolink-4",
) -> Report:
    """Measure first tokens of hand-overs between agents: with prefix reuse alone, with documents as
    chunks, with answers as chunks, too, and with hints of what comes next."""
    subject = setup.subject(
        workflows=workflows,
        document_tokens=document_tokens,
        answer_tokens=answer_tokens,
        pause=pause,
        policy=policy,
    )
    work = Work(workflows, document_tokens, answer_tokens, pause, policy)
    return run_agents(subject, work, progress=setup.progress)


@dataclass(frozen=True)
class Work:
    """Says how much is asked, and how."""

    workflows: int
    document_tokens: int
    answer_tokens: int
    pause: float
    policy: str

    def tokens(self, turns: Sequence[Turn]) -> int:
        """Return the tokens of all chunks that the workflows come to have."""
        documents = len({number for turn in turns for number in turn.documents})
        return self.workflows * (documents * self.document_tokens + len(turns) * self.answer_tokens)


@dataclass
class Asked:
    """What became of the requests of one system."""

    answers: list[tuple[Turn, Answer]]
    evicted: int = 0
    spared: int = 0


def run_agents(subject: MeasuredModel, work: Work, *, progress: Progress = silent) -> Report:
    """Ask all scenarios of all systems, first with room for all and then in a crowded store."""
    rows: list[Row] = []
    for scenario, turns in SCENARIOS.items():
        idle_marks = 0.0
        for store, share in (("idle", 4.0), ("crowded", CROWDED)):
            asked = {}
            for system in SYSTEMS:
                progress(f"{scenario}, {store} store: {system}")
                asked[system] = _ask(subject, work, turns, system, share)
            if store == "idle":
                idle_marks = statistics.median(_handed_over(asked["marks"]))
            marks = statistics.median(_handed_over(asked["marks"]))
            for system, found in asked.items():
                seconds = _handed_over(found)
                usages = [answer.usage for turn, answer in found.answers if turn.hears]
                prompt_tokens = sum(usage.prompt_tokens for usage in usages)
                computed = sum(usage.recomputed_tokens + usage.fresh_tokens for usage in usages)
                median = statistics.median(seconds)
                rows.append(
                    {
                        "scenario": scenario,
                        "system": system,
                        "store": store,
                        "n": len(seconds),
                        "ttft_ms": 1000 * median,
                        "vs_marks": median / marks,
                        "recomputed": computed / prompt_tokens,
                        "slow": sum(each > SLO * idle_marks for each in seconds),
                        "evicted": found.evicted,
                        "spared": found.spared,
                    }
                )
    return replace(subject.report(rows), columns=COLUMNS)


def _handed_over(asked: Asked) -> list[float]:
    """Return the seconds to the first tokens of requests that have other agents' answers."""
    return [answer.timing.ttft for turn, answer in asked.answers if turn.hears]


def _ask(
    subject: MeasuredModel, work: Work, turns: Sequence[Turn], system: str, share: float
) -> Asked:
    """Ask all turns of all workflows, which take turns; the first workflow is for warming up where
    there is room for all."""
    asked = Asked([])
    with _llm(subject, work, turns, share) as llm:
        letters = tuple(dict.fromkeys(llm.token_ids("abcdefghijklmnopqrstuvwxyz \n")))

        def listen(event: Event) -> None:
            asked.evicted += isinstance(event, ChunkEvicted)
            asked.spared += isinstance(event, ChunkSpared)

        runs = [
            _turns(llm, work, turns, system, number, letters) for number in range(work.workflows)
        ]
        llm.events.subscribe(listen)
        for _ in turns:
            for run in runs:
                asked.answers.append(next(run))
                time.sleep(work.pause)
    return asked


@contextmanager
def _llm(subject: MeasuredModel, work: Work, turns: Sequence[Turn], share: float) -> Iterator[LLM]:
    """Run the model with room for this share of all chunks, in memory, and of all prefixes."""
    from kvlinker.service.preloading import SCORE_BYTES

    tokens = int(share * work.tokens(turns))
    nbytes = tokens * (subject.loaded.kv_bytes_per_token + SCORE_BYTES)
    longest = 8 * (work.document_tokens + work.answer_tokens)
    with subject.llm(
        host_memory=nbytes,
        disk_space=0,
        kv_slots=max(tokens, longest),
        prefix_cache="on",
        chunk_scores=False,
    ) as llm:
        yield llm


def _turns(
    llm: LLM,
    work: Work,
    turns: Sequence[Turn],
    system: str,
    number: int,
    letters: tuple[int, ...],
) -> Iterator[tuple[Turn, Answer]]:
    """Yield the answers to a workflow's turns."""
    texts = [_text(work.document_tokens, f"{number} {each}") for each in range(4)]
    flow = Workflow(
        f"flow {number}",
        {str(place): [str(place + 1)] for place in range(len(turns) - 1)} or {"0": []},
    )
    documents = [] if system == "prefix" else list(llm.generate_context_cache(texts, ttl=3600))
    for place, turn in enumerate(turns):
        flow.uses(str(place), *(documents[each] for each in turn.documents if documents))
    said: list[Any] = []
    for place, turn in enumerate(turns):
        content = [
            *((documents or texts)[each] for each in turn.documents),
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
            policy="full" if system == "prefix" else work.policy,
            max_tokens=work.answer_tokens,
            ignore_eos=True,
            temperature=1.0,
            seed=place,
            allowed_token_ids=letters,
            **options,
        )
        yield turn, answer
        said.append(_spoken(llm, answer))
        if answer.kept is not None and answer.kept.id is not None:
            for later, other in enumerate(turns[place + 1 :], place + 1):
                if place in other.hears:
                    flow.uses(str(later), answer.kept.id)


def _spoken(llm: LLM, answer: Answer) -> Any:
    """Return an answer as a part of the next prompt: its context cache, or its text."""
    if answer.kept is None or answer.kept.id is None:
        return answer.text
    return llm.caches.get(answer.kept.id, tenant="default")


def _text(tokens: int, seed: str) -> str:
    """Return a text of so many bytes, which are tokens of the shapes."""
    letters = random.Random(seed).choices("abcdefghijklmnopqrstuvwxyz    ", k=tokens - 1)
    return "".join(letters) + "\n"


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw the time to the first token of hand-overs, by scenario and system."""
    pyplot = bench_library("matplotlib.pyplot")
    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.2), layout="constrained", sharey=True)
    for axes, store in zip(panels, ("idle", "crowded"), strict=True):
        bars: dict[str, list[float]] = defaultdict(list)
        for row in rows:
            if row["store"] == store:
                bars[row["system"]].append(row["ttft_ms"])
        for index, (system, heights) in enumerate(bars.items()):
            places = [place + 0.2 * index for place in range(len(heights))]
            axes.bar(places, heights, width=0.18, label=system)
        axes.set_xticks([place + 0.3 for place in range(len(SCENARIOS))], list(SCENARIOS))
        axes.set_title(f"{store} store")
    panels[0].set_ylabel("first token of a hand-over, ms")
    panels[1].legend()
    figure.savefig(path)
    pyplot.close(figure)
