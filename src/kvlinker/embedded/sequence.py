"""One request's state in the engine: its tokens, what of them is still to be computed, and where its KV lies."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items

import numpy as np
from numpy.typing import NDArray

from kvlinker.embedded.batch import Capture, Placed, Run
from kvlinker.embedded.logprobs import LogprobCollector
from kvlinker.embedded.pool import SlotRange
from kvlinker.engine.observation import Observer, QuestionProbe
from kvlinker.linking.plan import Placement
from kvlinker.linking.refinement import Refinement
from kvlinker.store.chunk_kv import ChunkKV
from kvlinker.store.loading.layer_stream import LayerStream

Range = tuple[int, int]


class Sequence:
    """Tokens of which some runs are computed, step by step; generated tokens join at the end.

    Only the scheduler and the engine's thread touch it.
    """

    def __init__(
        self,
        tokens: NDArray[np.int64],
        runs: Items[Range],
        *,
        placements: Items[tuple[Placement, ChunkKV]] = (),
        most_tokens: int,
        capture: Capture | None = None,
        probe: QuestionProbe | None = None,
        refine: Callable[[], tuple[Refinement, Observer | None]] | None = None,
        logprobs: LogprobCollector | None = None,
    ) -> None:
        """``most_tokens``: how long it can grow.

        With ``capture`` it holds chunks that are computed: no logits. With ``probe`` its runs are a first pass that
        ``relink`` follows. ``refine`` starts the way through the layers of a policy that refines. ``logprobs``: whose
        the logits of the prompt's last tokens are.
        """
        self._tokens = np.empty(most_tokens, dtype=np.int64)
        self._tokens[: len(tokens)] = tokens
        self._prompt_runs = tuple(runs)
        self._placements = tuple(placements)
        self.prompt_length = len(tokens)
        self.length = len(tokens)
        self.capture = capture
        self.probe = probe
        self.logprobs = logprobs
        self.held: SlotRange | None = None
        self._refine = refine
        self.refinement: Refinement | None = None
        self._watch: Observer | None = None
        self._placed = False
        self._pending: list[Range] = list(runs)

    def relink(self, runs: Items[Range], refine: Callable[[], tuple[Refinement, Observer | None]] | None) -> None:
        """The probe is done: compute these runs, over what is placed already. For a policy that refines, it is placed
        anew: the probe has overwritten the last token's KV where a chunk ends the prompt."""
        self.probe = None
        self._placed = refine is None
        self._prompt_runs = tuple(runs)
        self._pending = list(runs)
        self._refine = refine

    @property
    def most_tokens(self) -> int:
        return len(self._tokens)

    @property
    def tokens(self) -> NDArray[np.int64]:
        """All tokens so far, prompt and generated: [length]."""
        return self._tokens[: self.length]

    @property
    def computed(self) -> bool:
        """Nothing is left to compute until a token is appended."""
        return not self._pending

    @property
    def lost(self) -> bool:
        """A chunk to be placed will never be there as a whole: what was computed is of no use."""
        return any(isinstance(kv.layers, LayerStream) and kv.layers.lost for _, kv in self._placements)

    @property
    def decoding(self) -> bool:
        """Only the token that was generated last is left to compute."""
        return self._pending == [(self.length - 1, self.length)] and self.length > self.prompt_length

    def append(self, token: int) -> None:
        """Add a generated token; it is to be computed next."""
        self._tokens[self.length] = token
        self._pending.append((self.length, self.length + 1))
        self.length += 1

    def restart(self) -> None:
        """Forget all computed KV (its slots were taken): link and compute everything again."""
        self._placed = False
        self.refinement = None
        self._pending = list(self._prompt_runs)
        if self.length > self.prompt_length:
            self._pending.append((self.prompt_length, self.length))

    def take(self, budget: int) -> tuple[list[Run], list[Placed]]:
        """The next runs of at most ``budget`` tokens in all, and what to place before them; they count as done.

        A prompt whose policy refines is taken whole and alone, since what it keeps depends on all of its tokens and
        on no others.
        """
        assert self.held is not None
        slot = self.held.start
        placed: list[Placed] = []
        refinement = None
        if not self._placed:
            self._placed = True
            placed = [self._to_place(slot, *entry) for entry in self._placements]
        if self._refine is not None and self.refinement is None:
            self.refinement, self._watch = self._refine()
            refinement = self.refinement
            budget = self.prompt_length
        taken: list[Range] = []
        while self._pending and budget > 0:
            begin, end = self._pending[0]
            if refinement is not None and begin >= self.prompt_length:
                break
            cut = min(end, begin + budget)
            taken.append((begin, cut))
            budget -= cut - begin
            if cut == end:
                self._pending.pop(0)
            else:
                self._pending[0] = (cut, end)
        wants_logits = self.computed and self.capture is None and self.probe is None
        runs = [
            Run(
                slot,
                begin,
                self._tokens[begin:end],
                wants_logits=wants_logits and (begin, end) == taken[-1],
                capture=self.capture,
                refinement=refinement,
                observer=self._observer(refinement),
                logprobs=self.logprobs if self.probe is None else None,
            )
            for begin, end in taken
        ]
        return runs, placed

    def _observer(self, refinement: Refinement | None) -> Observer | None:
        if self.capture is not None:
            return self.capture.scores
        return self.probe if refinement is None else self._watch

    @staticmethod
    def _to_place(slot: int, placement: Placement, kv: ChunkKV) -> Placed:
        return Placed(
            kv,
            placement.first,
            placement.last,
            slot=slot + placement.start + placement.first,
            rotary_start=placement.rotary_start + placement.first,
        )
