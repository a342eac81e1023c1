"""What reuse without repair does to every token of the reader's examples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvlinker.research.evaluation.deviation import kv_distance
from kvlinker.research.figures.lab import Lab


@dataclass(frozen=True, eq=False)
class Reused:
    """One prompt under ``naive``, its tokens from chunks whose KV is not exact.

    ``deviation`` [layers, tokens]: KV deviation from a full prefill. ``first`` [tokens]: whether a chunk starts there.
    """

    deviation: NDArray[np.float32]
    first: NDArray[np.bool_]


def reused_tokens(lab: Lab, *, limit: int) -> Iterator[Reused]:
    """Every example; those without such tokens are left out."""
    with lab.bench(limit=limit) as bench:
        for done, example in enumerate(bench.examples):
            lab.progress("examples", done, len(bench.examples))
            messages = bench.messages(example)
            prompt = bench.llm.chat_prompt(messages)
            full, naive = (bench.inspector.inspect(messages, policy) for policy in ("full", "naive"))
            starts = np.zeros(len(prompt), dtype=np.bool_)
            starts[[span.start for span in prompt.spans]] = True
            if prompt.inexact.any():
                yield Reused(kv_distance(full, naive)[:, prompt.inexact], starts[prompt.inexact])
