"""All examples under all policies: in order, several at once if wanted, and going on where a run was stopped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from kvlinker.research.evaluation.answers import Examiner
from kvlinker.research.evaluation.examples import Example, Skipped
from kvlinker.research.evaluation.journal import Journal
from kvlinker.research.evaluation.results import Result

Outcome = tuple[Result, ...] | Skipped
"""One example's results, a policy each, or why it has none."""


def evaluate(
    examiner: Examiner,
    examples: Sequence[Example],
    policies: Sequence[str],
    *,
    concurrency: int = 1,
    journal: Journal | None = None,
) -> Iterator[tuple[Example, Outcome]]:
    """The outcome of every example, in order. ``concurrency``: examples that are asked at the same time."""

    def examine(example: Example) -> Outcome:
        return examiner.examine(example, policies)

    finished = {} if journal is None else {e.digest: journal.get(e.digest, policies) for e in examples}
    missing = [example for example in examples if finished.get(example.digest) is None]
    with ThreadPoolExecutor(concurrency, thread_name_prefix="kvlinker-evaluation") as pool:
        try:
            outcomes = pool.map(examine, missing)
            for example in examples:
                outcome: Outcome | None = finished.get(example.digest)
                if outcome is None:
                    outcome = next(outcomes)
                    if journal is not None and not isinstance(outcome, Skipped):
                        journal.add(outcome)
                yield example, outcome
        finally:
            pool.shutdown(cancel_futures=True)
