"""Measures policies under load for figures: servers of random weights, and rates beside what
``full`` sustains.

The papers' rates are those of their GPUs. Here a rate of 1 is what one user who waits for each
answer gets from ``full``, so that figures of any machine have the same horizontal axis.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

from kvlinker.quality.bench.harness.report import Row
from kvlinker.quality.progress import Progress
from kvlinker_lab.figures.lab import Lab
from kvlinker_lab.load.driver import ClosedLoop, OpenLoop
from kvlinker_lab.load.report import ServiceObjective
from kvlinker_lab.load.run import EMBEDDED, Competitor, LoadPlan, Start, run_load
from kvlinker_lab.load.servers import Server, kvlinker_server, model_to_serve
from kvlinker_lab.load.traffic import TrafficShape

SHAPE = "285m"
FULL_RATE_REQUESTS = 3
"""Requests that ``full``'s rate is measured with."""
_OBJECTIVE = ServiceObjective(ttft_seconds=10.0, tpot_seconds=0.25)


@dataclass(frozen=True)
class Serving:
    """Puts load on servers."""

    start: Start
    traffic: TrafficShape
    progress: Progress

    def measure(self, policies: Sequence[str], plan: LoadPlan) -> list[Row]:
        """Return a row per policy and load. Those that the server cannot be measured with have
        none."""
        competitors = [Competitor(policy, EMBEDDED) for policy in policies]
        return list(run_load(competitors, self.start, plan, progress=self.progress).rows)

    def at_rates(
        self, policies: Sequence[str], rates: Sequence[float], *, requests: int
    ) -> list[Row]:
        """Measure policies at rates that are multiples of ``full``'s; rows have the multiple as
        ``relative_rate``."""
        alone = self.plan([ClosedLoop(1)], requests=min(requests, FULL_RATE_REQUESTS))
        (full,) = self.measure(["full"], alone)
        multiples = {full["requests_per_s"] * rate: rate for rate in rates}
        rows = self.measure(
            policies, self.plan([OpenLoop(rate) for rate in multiples], requests=requests)
        )
        return [{**row, "relative_rate": multiples[row["rate"]]} for row in rows]

    def at_once(self, policies: Sequence[str], batches: Sequence[int], *, seed: int) -> list[Row]:
        """Measure policies with batches of requests that come all at once."""
        rows = []
        for batch in batches:
            plan = self.plan([ClosedLoop(batch)], requests=batch)
            rows += self.measure(policies, replace(plan, warm_up=1, seed=seed))
        return rows

    def plan(self, loads: Sequence[OpenLoop | ClosedLoop], *, requests: int) -> LoadPlan:
        """Make the plan of this traffic."""
        return LoadPlan(self.traffic, loads, requests=requests, objective=_OBJECTIVE)


@contextmanager
def serve_shape(lab: Lab, traffic: TrafficShape) -> Iterator[Serving]:
    """Serve random weights of the lab's shape, or of ``SHAPE``, by the embedded engine.

    Linking policies share a server without a prefix cache, so that none finds what another
    computed. Documents as text get a new server for each measurement, whose prefix cache has seen
    nothing else.
    """
    embedded = lab.settings.model_copy(update={"engine": EMBEDDED})
    with (
        model_to_serve(embedded, lab.shape or SHAPE) as settings,
        kvlinker_server(settings, disk_space=0, prefix_cache="off") as linking,
    ):

        def start(competitor: Competitor) -> AbstractContextManager[Server]:
            return (
                nullcontext(Server(linking.url))
                if competitor.links
                else kvlinker_server(settings, disk_space=0)
            )

        yield Serving(start, traffic, lab.progress)


def value_at(rows: Sequence[Row], policy: str, load: str, at: float, column: str) -> float | None:
    """Return a column of the policy's row where the column ``load`` is ``at``; None where it has
    none."""
    found = [row[column] for row in rows if row["policy"] == policy and row[load] == at]
    return found[0] if found else None


def ratios(
    rows: Sequence[Row], over: str, under: str, load: str, column: str
) -> dict[float, float]:
    """Return one policy's column over another's, by load; where both have one."""
    found = {}
    for at in sorted({row[load] for row in rows}):
        above, below = (value_at(rows, policy, load, at, column) for policy in (over, under))
        if above is not None and below:
            found[at] = above / below
    return found


def describe_ratios(found: dict[float, float]) -> str:
    """Tell ratios by load in a few words: ``1.2× at 0.5, 3.4× at 1``; ``nowhere comparable`` if
    there are none."""
    return (
        ", ".join(f"{ratio:.1f}× at {at:g}" for at, ratio in found.items()) or "nowhere comparable"
    )
