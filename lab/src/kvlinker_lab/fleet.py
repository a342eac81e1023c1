"""Simulates a fleet event by event, and compares how requests are routed: by the library that
``kvlinker router`` uses, and as others do."""

from __future__ import annotations

import heapq
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Annotated

import numpy as np
import typer

from kvlinker.base.types.residency import MEMORY, KnownChunk, ResidencyReport
from kvlinker.fleet.naming import PromptOutline, WantedChunk
from kvlinker.fleet.router import Decision, Router
from kvlinker.quality.bench.harness.benchmark import Setup, benchmark, counts, names
from kvlinker.quality.bench.harness.report import Report, Row, describe_machine, versions
from kvlinker.quality.progress import Progress, silent

COLUMNS = (
    "case",
    "replicas",
    "resident_percent",
    "computed_per_s",
    "ttft_p50_ms",
    "ttft_p99_ms",
    "decisions_per_s",
)
RULES = ("round_robin", "least_loaded", "prefix", "resident")

CHUNKS = 8
TOKENS = 512
TOPIC = 16
"""The chunks of one document, of which a prompt has six; two more are shared by many topics."""

WARM_SHARE = 0.5
"""The share of all requests that fill the replicas' memory, and are not counted."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What a replica takes, in seconds: for a prompt whose chunks are all resident, and for each
    chunk that is not."""

    link: float
    chunk: float


@dataclass(slots=True)
class _Replica:
    room: int
    resident: OrderedDict[int, None] = field(default_factory=OrderedDict)
    free_at: float = 0.0
    waiting: int = 0
    added: dict[int, None] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)

    def use(self, chunks: Sequence[int]) -> int:
        """Have chunks resident; returns how many were not."""
        missing = 0
        for chunk in chunks:
            if chunk not in self.resident:
                missing += 1
                self.added[chunk] = None
                self.gone.discard(chunk)
            self.resident[chunk] = None
            self.resident.move_to_end(chunk)
        while len(self.resident) > self.room:
            old, _ = self.resident.popitem(last=False)
            self.added.pop(old, None)
            self.gone.add(old)
        return missing


class _Rule:
    """Decides where a prompt goes."""

    def __init__(self, replicas: Sequence[_Replica], costs: Costs, seed: int) -> None:
        self.replicas = replicas
        self.costs = costs
        self.random = np.random.default_rng(seed)

    def choose(self, chunks: Sequence[int], now: float) -> int:
        raise NotImplementedError

    def began(self, index: int, seconds: float) -> None:
        """Note the first byte of a request, the ``index``-th that was decided."""

    def report(self, now: float) -> None:
        """Take what all replicas report."""


class _RoundRobin(_Rule):
    turn = -1

    def choose(self, chunks: Sequence[int], now: float) -> int:
        self.turn += 1
        return self.turn % len(self.replicas)


class _LeastLoaded(_Rule):
    def choose(self, chunks: Sequence[int], now: float) -> int:
        waiting = np.array([replica.waiting for replica in self.replicas])
        return int((waiting + self.random.random(len(waiting))).argmin())


class _Prefix(_LeastLoaded):
    """Follows the longest beginning that a replica was sent, unless that one is far busier."""

    imbalance = 4

    def __init__(self, replicas: Sequence[_Replica], costs: Costs, seed: int) -> None:
        super().__init__(replicas, costs, seed)
        self.sent: defaultdict[int, set[int]] = defaultdict(set)

    def choose(self, chunks: Sequence[int], now: float) -> int:
        chain, best, chains = 0, set[int](), []
        for chunk in chunks:
            chain = hash((chain, chunk))
            chains.append(chain)
            best = self.sent[chain] or best
        least = min(replica.waiting for replica in self.replicas)
        found = min(best, key=lambda r: self.replicas[r].waiting, default=None)
        if found is None or self.replicas[found].waiting > least + self.imbalance:
            found = super().choose(chunks, now)
        for chain in chains:
            self.sent[chain].add(found)
        return found


class _Resident(_Rule):
    """The library, fed by reports of changes."""

    def __init__(self, replicas: Sequence[_Replica], costs: Costs, seed: int) -> None:
        super().__init__(replicas, costs, seed)
        self.router = Router(seed=seed)
        self.decisions: list[Decision] = []
        for number in range(len(replicas)):
            self.router.add(str(number))
            self.router.set_ready(str(number), True)
        self.report(0.0)

    def choose(self, chunks: Sequence[int], now: float) -> int:
        wanted = tuple(WantedChunk(_key(chunk)[:24], TOKENS) for chunk in chunks)
        decision = self.router.choose(PromptOutline(wanted), now)
        assert decision is not None
        self.decisions.append(decision)
        return int(decision.replica)

    def began(self, index: int, seconds: float) -> None:
        self.router.began(self.decisions[index], seconds)
        self.router.ended(self.decisions[index])

    def report(self, now: float) -> None:
        for number, replica in enumerate(self.replicas):
            chunks = {
                _key(chunk): KnownChunk((MEMORY,), (_key(chunk)[:24],)) for chunk in replica.added
            }
            gone = tuple(map(_key, replica.gone))
            whole = self.router.replicas[str(number)].epoch is None
            replica.added.clear()
            replica.gone.clear()
            self.router.report(
                str(number),
                ResidencyReport("run", 0, whole, chunks, gone),
                running=0,
                waiting=replica.waiting,
                seconds_per_token=self.costs.chunk / TOKENS,
            )


_RULES: Mapping[str, Callable[[Sequence[_Replica], Costs, int], _Rule]] = {
    "round_robin": _RoundRobin,
    "least_loaded": _LeastLoaded,
    "prefix": _Prefix,
    "resident": _Resident,
}


def _key(chunk: int) -> str:
    return sha256(str(chunk).encode()).hexdigest()


@benchmark("fleet")
def fleet(
    setup: Setup,
    *,
    replicas: Annotated[str, typer.Option(help="Sizes of fleets, with commas between.")] = "4,16",
    rules: Annotated[
        str, typer.Option(help=f"Rules to compare, with commas between: {', '.join(RULES)}.")
    ] = ",".join(RULES),
    load: Annotated[
        float, typer.Option(min=0.05, help="Arrivals over what the fleet can do at 60% resident.")
    ] = 0.7,
    room: Annotated[int, typer.Option(min=8, help="Chunks that each replica can hold.")] = 1000,
    requests: Annotated[int, typer.Option(min=10, help="Requests per replica.")] = 600,
    link_ms: Annotated[float, typer.Option(help="A prompt whose chunks are all resident.")] = 60,
    chunk_ms: Annotated[float, typer.Option(help="Computing a chunk of 512 tokens.")] = 45,
    report_seconds: Annotated[float, typer.Option(help="From one report to the next.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of arrivals and prompts.")] = 0,
) -> Report:
    """Simulate a fleet whose corpus is as large as all its memory together, and compare rules.

    The default costs are those of an 8B model on an H100, as published: 60 ms to link eight chunks
    of 512 tokens, 45 ms to compute one. No model is run.
    """
    return run_fleet(
        counts(replicas),
        [rule for rule in names(rules) if _known(rule)],
        Costs(link_ms / 1e3, chunk_ms / 1e3),
        load=load,
        room=room,
        requests=requests,
        report_seconds=report_seconds,
        seed=seed,
        command=setup.command,
        progress=setup.progress,
    )


def _known(rule: str) -> bool:
    if rule not in _RULES:
        raise typer.BadParameter(f"{rule!r} is no rule; known are {', '.join(RULES)}")
    return True


def run_fleet(
    sizes: Sequence[int],
    rules: Sequence[str],
    costs: Costs,
    *,
    load: float,
    room: int,
    requests: int,
    report_seconds: float,
    seed: int,
    command: str,
    progress: Progress = silent,
) -> Report:
    """Simulate each rule on the same requests, for each size of the fleet."""
    import torch

    rows: list[Row] = []
    for size in sizes:
        prompts = list(_prompts(size * room, size * requests, seed))
        rate = load * size / (costs.link + 0.4 * CHUNKS * costs.chunk)
        gaps = np.random.default_rng(seed + 1).exponential(1 / rate, len(prompts))
        arrivals = np.cumsum(gaps).tolist()
        for rule in rules:
            progress(f"{size} replicas, {rule}")
            made = [_Replica(room) for _ in range(size)]
            chosen = _RULES[rule](made, costs, seed)
            served = _simulated(made, chosen, prompts, arrivals, costs, report_seconds)
            rows.append({"case": rule, "replicas": size, **served})
    return Report(
        command=command,
        machine=describe_machine(torch.device("cpu")),
        versions=versions(),
        settings={
            "load": load,
            "room": room,
            "requests": requests,
            "link_ms": 1e3 * costs.link,
            "chunk_ms": 1e3 * costs.chunk,
            "report_seconds": report_seconds,
        },
        rows=rows,
        columns=COLUMNS,
    )


def _prompts(corpus: int, count: int, seed: int) -> Iterator[tuple[int, ...]]:
    """Yield prompts of six chunks of one document, in any order, and two that are common; documents
    are as popular as Zipf's law says."""
    random = np.random.default_rng(seed)
    topics = corpus // TOPIC
    weights = np.cumsum(1 / np.arange(1, topics + 1))
    documents = np.searchsorted(weights / weights[-1], random.random(count))
    common = np.searchsorted(weights / weights[-1], random.random((count, 2)))
    for document, others in zip(documents.tolist(), common.tolist(), strict=True):
        own = (document * TOPIC + random.permutation(TOPIC)[: CHUNKS - 2]).tolist()
        prompt = list(dict.fromkeys([*own, *(other * TOPIC for other in others)]))
        random.shuffle(prompt)
        yield tuple(prompt)


def _simulated(
    replicas: Sequence[_Replica],
    rule: _Rule,
    prompts: Sequence[Sequence[int]],
    arrivals: Sequence[float],
    costs: Costs,
    report_seconds: float,
) -> Row:
    """Serve all prompts, each replica one after another; returns what became of those behind the
    warm-up."""
    first = int(len(prompts) * WARM_SHARE)
    ends: list[tuple[float, int, int]] = []
    times, missed, wanted, deciding, reported = [], 0, 0, 0.0, 0.0
    for index, (chunks, now) in enumerate(zip(prompts, arrivals, strict=True)):
        while ends and ends[0][0] <= now:
            end, done, number = heapq.heappop(ends)
            replicas[number].waiting -= 1
            rule.began(done, end - arrivals[done])
        if now - reported >= report_seconds:
            reported = now
            rule.report(now)
        began = time.process_time()
        number = rule.choose(chunks, now)
        deciding += time.process_time() - began
        replica = replicas[number]
        missing = replica.use(chunks)
        service = costs.link + missing * costs.chunk
        replica.free_at = max(replica.free_at, now) + service
        replica.waiting += 1
        heapq.heappush(ends, (replica.free_at, index, number))
        if index >= first:
            times.append(replica.free_at - now)
            missed += missing
            wanted += len(chunks)
    span = arrivals[-1] - arrivals[first]
    return {
        "resident_percent": 100 * (1 - missed / wanted),
        "computed_per_s": missed / span,
        "ttft_p50_ms": 1e3 * float(np.quantile(times, 0.5)),
        "ttft_p99_ms": 1e3 * float(np.quantile(times, 0.99)),
        "decisions_per_s": len(prompts) / max(deciding, 1e-9),
    }
