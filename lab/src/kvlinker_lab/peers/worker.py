"""Runs a peer in a process of its own: ``python -m kvlinker_lab.peers.worker TASK RESULT``, with
JSON files."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import psutil

from kvlinker.quality.bench.decode import decode_case
from kvlinker_lab.peers.peer import LinkingPeer, Task, find_peer
from kvlinker_lab.processes import peak_memory

COMPARED_TOKENS = 64
"""The length of the text whose log probabilities show whether peers run the same model."""


@dataclass(frozen=True)
class Measured:
    """The measurements that one process made of its peer. All values are ones that JSON has."""

    seconds: Mapping[str, float]
    """Seconds by case: from the start of the process to a loaded model, to a first token, and per
    step of decoding."""
    peak_bytes: int
    """The most bytes that were resident, of the process and of those that it started."""
    logprobs: Sequence[float] | None
    """The log probabilities of the compared text's tokens, in nats; None where the peer does not
    tell them."""
    versions: Mapping[str, str]
    """The versions of the peer's own packages."""
    own_seconds: float = 0.0
    """The time until the comparison's own code was there, before the peer's."""
    own_bytes: int = 0
    """The bytes that were resident then."""


def measure(task: Task) -> Measured:
    """Run a task's peer in this process, and measure it.

    Every case runs on tokens that the peer has not seen, so that no cache of prefixes helps. One
    prefill, which does not count, lets it set up what it needs for its first request.
    """
    own_seconds, own_bytes = time.time() - task.started, _peak_bytes()
    kind = find_peer(task.peer)
    generator = np.random.default_rng(0)

    def tokens(count: int) -> list[int]:
        drawn: list[int] = generator.integers(0, task.vocabulary, count).tolist()
        return drawn

    with kind.start(task) as peer:
        seconds = {"load": time.time() - task.started}
        logprobs = peer.logprobs(tokens(min(COMPARED_TOKENS, task.prefill_tokens)))
        peer.prefill(tokens(task.prefill_tokens))
        seconds[f"prefill {task.prefill_tokens}"] = peer.prefill(tokens(task.prefill_tokens))
        for batch in task.batches:
            behind = np.array([tokens(task.context_tokens) for _ in range(batch)])
            seconds[f"decode {decode_case(batch, task.fresh)}"] = peer.decode_step(
                behind, steps=task.steps
            )
        if task.linked is not None and isinstance(peer, LinkingPeer):
            for batch in task.batches:
                prompts = task.linked.prompts(task.vocabulary, batch)
                step = peer.linked_decode_step(prompts, steps=task.steps)
                seconds[f"decode {decode_case(batch, task.linked)}"] = step
        return Measured(
            seconds=seconds,
            peak_bytes=_peak_bytes(),
            logprobs=None if logprobs is None else list(logprobs),
            versions=_versions(kind.distributions),
            own_seconds=own_seconds,
            own_bytes=own_bytes,
        )


def _peak_bytes() -> int:
    """Return the sum of what this process and those that it started had resident, each at its own
    peak."""
    running = psutil.Process()
    return sum(peak_memory(process.pid) for process in (running, *running.children(recursive=True)))


def _versions(distributions: Sequence[str]) -> dict[str, str]:
    found = {}
    for name in distributions:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def main() -> None:
    """Read the task, run it, and write its measurements."""
    task, result = map(Path, sys.argv[1:])
    measured = measure(Task(**json.loads(task.read_text())))
    result.write_text(json.dumps(asdict(measured)))


if __name__ == "__main__":
    main()
