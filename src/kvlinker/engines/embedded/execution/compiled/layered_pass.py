"""A pass over a piece of a prompt that is computed some layers at a time, between steps of requests
that decode.

A piece of few tokens reads all KV before it for these few. A larger one, of which a step computes
only some layers, reads it once, and delays those who decode no longer ("layered prefill").
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kvlinker.engines.embedded.execution.batch import StepResult
from kvlinker.engines.embedded.model.recording.program import Program, RecordedAttention


class LayeredPass:
    """Computes the operations of a program in parts: up to each layer's attention, and the rest.

    Its tokens' KV is there once it is done. What it computes meanwhile lies in memory of its own,
    and in slots that nobody else reads or writes.
    """

    def __init__(
        self,
        program: Program,
        compute: Callable[[int, int], None],
        result: Callable[[], StepResult],
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``compute`` takes the operations [begin, end); ``result`` is called behind the last."""
        self._ends = [
            number
            for number, operation in enumerate(program.operations, start=1)
            if isinstance(operation, RecordedAttention)
        ]
        self._ends.append(len(program.operations))
        self._compute = compute
        self._result = result
        self._clock = clock
        self._begin = 0
        self.seconds = 0.0
        """How long it has taken so far."""

    def go_on(self, until: float) -> StepResult | None:
        """Compute one part, and more as long as half of the next one should be done by ``until``,
        in seconds of the clock. Returns the result once all are computed, and None before."""
        begin = self._clock()
        while self._ends:
            end = self._ends.pop(0)
            self._compute(self._begin, end)
            self._begin = end
            now = self._clock()
            self.seconds += now - begin
            if now + (now - begin) / 2 > until and self._ends:
                return None
            begin = now
        return self._result()
