"""Whatever an engine computed before, and keeps, its answers are those of an engine that reuses
nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvlinker.base.events import Event, PrefixRestored
from kvlinker.base.types.chunks import Chunk
from kvlinker.prompting.segments import CachedSegment, FreshSegment, Prompt, Segment
from kvlinker.store import DiskTier
from kvlinker.store.prefixes import SpilledPrefixes
from tests.engines.embedded.conftest import Bench, Outcome, random_tokens
from tests.properties import examples

TOLERANCE = 3e-5
CHUNKS = [Chunk(random_tokens(length, [8, length])) for length in (20, 31, 44)]
POLICIES = ["full", "naive", "legolink-4", "prefix", "cacheblend-20"]
"""What they compute again does not depend on what stands behind it, so that later turns are linked
as the first was."""

LOOKING = ["query-10", "query-10+legolink-2"]
"""They look at the question, so that only the first turn is linked as without reuse."""

COMMON = "common"
MOST_TURNS = 5


@dataclass
class Talk:
    """A conversation over chunks: all that was said, and in which way it is linked."""

    tenant: str
    policy: str
    parts: list[int | tuple[int, ...]]
    """Chunks by number, and fresh tokens."""

    turns: int = 1
    crosses: bool = False
    """True where other policies' conversations begin with the same tokens."""

    busy: bool = False
    asked: Prompt | None = None
    answer: tuple[int, ...] = ()

    @property
    def prompt(self) -> Prompt:
        return prompt_of(self.parts)


@dataclass
class Running:
    talk: Talk
    prompt: Prompt
    outcomes: list[Outcome]
    handle: Any
    cancelled: bool = field(default=False)


def prompt_of(parts: list[int | tuple[int, ...]], exact: int = 0) -> Prompt:
    """A prompt of these parts, whose first ``exact`` chunks are fresh tokens."""
    segments: list[Segment] = []
    chunks = 0
    for part in parts:
        if isinstance(part, int) and chunks >= exact:
            segments.append(CachedSegment(CHUNKS[part]))
        else:
            segments.append(FreshSegment(CHUNKS[part].tokens if isinstance(part, int) else part))
        chunks += isinstance(part, int)
    return Prompt(tuple(segments))


def alike(outcome: Outcome, cold: Outcome) -> bool:
    same = outcome.tokens == cold.tokens
    return same and bool(np.allclose(outcome.logprobs, cold.logprobs, atol=TOLERANCE, rtol=0))


class ReuseMachine(RuleBasedStateMachine):
    """Conversations of two tenants come, go on, fork, are asked again, at the same time, and are
    cancelled, in a pool that keeps some of what they left, while the rest goes to disk; chunks' KV
    vanishes."""

    warm: ClassVar[Bench]
    cold: ClassVar[Bench]
    family: ClassVar[str] = "llama"
    options: ClassVar[dict[str, Any]] = {}
    spills: ClassVar[bool] = True
    examples: ClassVar[Iterator[int]] = count()
    known: ClassVar[dict[tuple[Any, str], Outcome]] = {}
    reused: ClassVar[int] = 0

    @initialize()
    def begin_example(self) -> None:
        self.example = next(self.examples)
        self.talks: list[Talk] = []
        self.running: list[Running] = []
        self.said: dict[
            str, list[np.ndarray]
        ] = {}  # what a tenant's requests have computed, at the most

    @property
    def idle(self) -> list[Talk]:
        return [talk for talk in self.talks if not talk.busy]

    @rule(
        tenant=st.sampled_from("ab"),
        policy=st.sampled_from([*POLICIES, *LOOKING]),
        crosses=st.booleans(),
        header=st.integers(0, 30),
        chunks=st.lists(st.integers(0, 2), max_size=3),
        question=st.integers(0, 1),
    )
    def begin(self, tenant, policy, crosses, header, chunks, question) -> None:
        crosses = crosses and policy in ("full", "naive", "legolink-4")
        kind = COMMON if crosses else policy
        opening = random_tokens(header, [self.example, 3, *kind.encode()])
        parts: list[int | tuple[int, ...]] = [
            opening,
            *chunks,
            random_tokens(9 + question, [4, question]),
        ]
        talk = Talk(f"{self.example}-{tenant}", policy, parts, crosses=crosses)
        self.talks.append(talk)
        self.ask(talk)

    @precondition(lambda self: self.idle)
    @rule(data=st.data())
    def ask_again(self, data) -> None:
        self.ask(data.draw(st.sampled_from(self.idle)))

    @precondition(lambda self: any(talk.answer and talk.turns < MOST_TURNS for talk in self.idle))
    @rule(data=st.data(), said=st.integers(0, 2), forks=st.booleans())
    def say(self, data, said, forks) -> None:
        """A conversation goes on; where it ``forks``, the old one can go on, too."""
        going = [t for t in self.idle if t.answer and t.turns < MOST_TURNS and t.policy in POLICIES]
        if not going:
            return
        talk = data.draw(st.sampled_from(going))
        parts = [*talk.parts, talk.answer, random_tokens(5 + said, [5, said])]
        following = Talk(talk.tenant, talk.policy, parts, talk.turns + 1, talk.crosses)
        if not forks:
            self.talks.remove(talk)
        self.talks.append(following)
        self.ask(following)

    @rule(length=st.integers(1, 250), number=st.integers(0, 5))
    def disturb(self, length, number) -> None:
        """Somebody's long prompt pushes out some of what was kept, and a chunk's KV vanishes."""
        keys = sorted(self.warm.store.keys())
        if keys:
            self.warm.store.delete(keys[number % len(keys)])
        self.warm.answer(
            Prompt((FreshSegment(random_tokens(length, [6, self.example, length])),)),
            "full",
            max_tokens=1,
        )

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def cancel(self, data) -> None:
        chosen = data.draw(st.sampled_from(self.running))
        chosen.cancelled = True
        chosen.handle.cancel()

    @precondition(lambda self: self.running)
    @rule()
    def join(self) -> None:
        """Wait for all that is under way, and compare it."""
        for running in self.running:
            for outcome in running.outcomes:
                outcome.wait()
        for running in self.running:
            self.compare(running)
        self.running.clear()

    def teardown(self) -> None:
        self.join()
        self.warm.settle()

    def ask(self, talk: Talk) -> None:
        if talk.crosses:
            # so that a prefix ends at a chunk's end, where there is something to compare with
            self.join()
        prompt = talk.prompt
        outcome, handle = self.warm.submit(prompt, talk.policy, talk.tenant, max_tokens=4)
        talk.busy = True
        self.running.append(Running(talk, prompt, [outcome], handle))
        if talk.crosses:
            self.join()

    def compare(self, running: Running) -> None:
        talk, (outcome,) = running.talk, running.outcomes
        talk.busy = False
        before = self.said.setdefault(talk.tenant, [])
        assert outcome.failed is None, outcome.failed
        assert outcome.finished is not None
        if running.cancelled:  # maybe too late
            before.append(np.array([*running.prompt.tokens, *outcome.tokens]))
            return
        usage = outcome.finished.usage
        assert usage.prompt_tokens == len(running.prompt)
        assert min(usage.cached_tokens, usage.recomputed_tokens, usage.fresh_tokens) >= 0
        type(self).reused += usage.exact_cached_tokens > 0
        others = [
            other.prompt.tokens
            for other in self.running
            if other.talk.tenant == talk.tenant and other != running
        ]
        common = max(
            (_common(running.prompt.tokens, each) for each in [*before, *others]), default=0
        )
        assert usage.exact_cached_tokens <= common, "nothing but the tenant's own"
        candidates = (
            range(sum(isinstance(part, int) for part in talk.parts) + 1)
            if talk.crosses
            else range(1)
        )
        assert any(alike(outcome, self.without_reuse(talk, exact)) for exact in candidates), talk
        talk.answer = tuple(outcome.tokens)
        before.append(np.array([*running.prompt.tokens, *outcome.tokens]))

    def without_reuse(self, talk: Talk, exact: int) -> Outcome:
        prompt = prompt_of(talk.parts, exact)
        if (prompt, talk.policy) not in self.known:
            self.known[prompt, talk.policy] = self.cold.answer(prompt, talk.policy, max_tokens=4)
        return self.known[prompt, talk.policy]


def _common(one: np.ndarray, other: np.ndarray) -> int:
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    return int(differ[0]) if differ.size else length


class StatesMachine(ReuseMachine):
    """The same, where layers keep a state, of which a few are kept at the ends of turns and
    chunks."""

    family = "qwen3_5-states"
    options: ClassVar[dict[str, Any]] = {"max_running": 4}
    spills = False
    known: ClassVar[dict[tuple[Any, str], Outcome]] = {}
    reused: ClassVar[int] = 0


class ConvolutionsMachine(StatesMachine):
    """The same, where layers only convolve."""

    family = "lfm2-convolutions"
    known: ClassVar[dict[tuple[Any, str], Outcome]] = {}
    reused: ClassVar[int] = 0


MACHINES = (ReuseMachine, StatesMachine, ConvolutionsMachine)


@pytest.fixture(autouse=True)
def _engines(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    (machine,) = (each for each in MACHINES if issubclass(request.cls, each.TestCase))
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(SpilledPrefixes, "pays", lambda self, nbytes, seconds: True)
        machine.warm = Bench(
            machine.family,
            prefix_cache="on",
            kv_slots=350,
            max_step_tokens=50,
            **machine.options,
            slower=lambda events: [DiskTier(tmp_path, 1 << 24, events)],
        )
        machine.cold = Bench(machine.family)
        restored: list[Event] = []
        machine.warm.events.subscribe(restored.append)
        yield
        assert machine.reused > 5
        if machine.spills:
            assert any(isinstance(event, PrefixRestored) for event in restored)
        machine.warm.close()
        machine.cold.close()


def slow(machine: type[ReuseMachine]) -> Any:
    machine.TestCase.settings = examples(15, stateful_step_count=25, deadline=None)
    return pytest.mark.whole(machine.TestCase)


TestReuse = slow(ReuseMachine)
TestStates = slow(StatesMachine)
TestConvolutions = slow(ConvolutionsMachine)
