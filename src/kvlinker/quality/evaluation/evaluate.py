"""Runs all examples under all policies: in order, several at once if wanted, and continues a
stopped run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.types.chunks import LAST_PLACE
from kvlinker.quality.evaluation.examples import (
    Example,
    ExampleAnswer,
    ExampleResults,
    Result,
    Scored,
    Skipped,
)

if TYPE_CHECKING:
    from kvlinker.quality.evaluation.examiner import Examiner


def evaluate(
    examiner: Examiner,
    examples: Sequence[Example],
    policies: Sequence[str],
    *,
    concurrency: int = 1,
    journal: Journal | None = None,
) -> Iterator[tuple[Example, ExampleResults]]:
    """Yield every example with its results, in order.

    ``concurrency`` examples run at the same time. Those that the ``journal`` already holds are
    skipped. The passages' KV for later places is computed behind those of other examples, as in a
    collection of which a prompt takes a few. Raises PolicyError for a policy that the engine cannot
    follow.
    """
    mixed = _mix_passages(examples)

    def examine(example: Example) -> ExampleResults:
        return examiner.examine(example, policies, mixed[example])

    finished = (
        {} if journal is None else {e.digest: journal.get(e.digest, policies) for e in examples}
    )
    missing = [example for example in examples if finished.get(example.digest) is None]
    if missing:
        examiner.require_supported(policies)
    pool = ThreadPoolExecutor(concurrency, thread_name_prefix="kvlinker-evaluation")
    is_interrupted = False
    try:
        asked = pool.map(examine, missing)
        for example in examples:
            results: ExampleResults | None = finished.get(example.digest)
            if results is None:
                results = next(asked)
                if journal is not None and not isinstance(results, Skipped):
                    journal.add(results)
            yield example, results
    except (KeyboardInterrupt, SystemExit):
        is_interrupted = True
        raise
    finally:
        # An example may take minutes: that of an interrupted run ends when the engine is closed.
        pool.shutdown(wait=not is_interrupted, cancel_futures=True)


def _mix_passages(examples: Sequence[Example]) -> dict[Example, tuple[str, ...]]:
    """Mix the passages of as many examples as a row has chunks: the passages of one example are in
    different rows."""
    mixed: dict[Example, tuple[str, ...]] = {}
    for begin in range(0, len(examples), LAST_PLACE + 1):
        several = examples[begin : begin + LAST_PLACE + 1]
        columns = zip_longest(*(example.passages for example in several))
        passages = tuple(each for column in columns for each in column if each is not None)
        mixed |= dict.fromkeys(several, passages)
    return mixed


class Journal:
    """Keeps finished results in a JSON Lines file, so that a run that was stopped can go on.

    The first line holds the settings, which must be the same when the run goes on.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        """Read ``path`` if it exists; a last line that was cut off is dropped.

        Raises InvalidRequestError for a file that is no journal, or one of a run with other
        settings.
        """
        self._path = path
        self._results: dict[tuple[str, str], Result] = {}
        header = json.dumps({"settings": settings}, sort_keys=True)
        try:
            lines = path.read_text().split("\n") if path.exists() else [""]
            if lines == [""]:
                path.write_text(header + "\n")
                return
            self._check_settings(json.loads(lines[0])["settings"], json.loads(header)["settings"])
            complete, cut_off = lines[1:-1], lines[-1]
            for line in complete:
                self._keep(_result(json.loads(line)))
            if cut_off:
                path.write_text("\n".join(lines[:-1]) + "\n")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InvalidRequestError(
                f"{path} cannot be used to resume: {error}. Give a file that a run with --resume"
                " has written, or a new one.",
                param="resume",
            ) from error

    def get(self, example: str, policies: Iterable[str]) -> tuple[Result, ...] | None:
        """Return the results of an example (its digest) under all of the policies; None when one is
        missing."""
        found = [self._results.get((example, policy)) for policy in policies]
        return None if None in found else tuple(result for result in found if result is not None)

    def add(self, results: Iterable[Result]) -> None:
        """Keep results. They are in the file when this returns."""
        with self._path.open("a") as file:
            for result in results:
                if (result.example, result.policy) not in self._results:
                    file.write(json.dumps(asdict(result)) + "\n")
                    self._keep(result)

    def _keep(self, result: Result) -> None:
        self._results[result.example, result.policy] = result

    def _check_settings(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        changed = [
            f"{name} was {before.get(name)!r} and is {now.get(name)!r}"
            for name in sorted({*before, *now})
            if before.get(name) != now.get(name)
        ]
        if changed:
            raise InvalidRequestError(
                f"{self._path} holds results of a run with other settings: {'; '.join(changed)}."
                " Give another file.",
                param="resume",
            )


def _result(fields: dict[str, Any]) -> Result:
    return Scored(**fields) if "loss" in fields else ExampleAnswer(**fields)
