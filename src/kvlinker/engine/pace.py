"""How fast the engine computes, as measured while it does."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import torch

from kvlinker.engine.batch import Batch
from kvlinker.engine.cost import CostModel
from kvlinker.engine.loading import LoadedModel
from kvlinker.machine import processor
from kvlinker.store.layer_loader import Urgency
from kvlinker.store.layer_stream import LayerStream
from kvlinker.store.speeds import Speeds

_WEIGHT = 0.2
"""Of a new measurement, beside all earlier ones, if it is of ``_USUAL_TOKENS`` or more; of fewer, in proportion."""

_USUAL_TOKENS = 512
_LEAST_TOKENS = 8
"""Steps whose runs are all shorter mostly wait for memory, and tell nothing of prompts."""

Range = tuple[int, int]


class Pace:
    """Seconds that tokens take: a · tokens + b · pairs, a pair being a token and one that it sees. A prompt of L tokens
    has L(L + 1)/2 pairs, so that T_prefill(L) grows faster than L. a and b follow the steps that are computed.

    The engine's thread notes, any thread may ask.
    """

    def __init__(self, cost: CostModel, speeds: Speeds | None = None, name: str = "prefill") -> None:
        """``cost`` says how a and b compare until that is measured. ``speeds`` keeps a and b, under ``name``."""
        self._shape = np.array([cost.per_token, cost.per_pair])
        self._speeds = speeds or Speeds()
        self._name = name
        self._lock = threading.Lock()

    def note(self, batch: Batch, seconds: float) -> None:
        """A step computed ``batch`` in ``seconds``. Steps that leave tokens out, or may have waited for KV, do not
        count."""
        narrowed = any(run.refinement is not None for run in batch.runs)
        streamed = any(isinstance(placed.kv.layers, LayerStream) for placed in batch.placed)
        ranges = [(run.start, run.end) for run in batch.runs]
        if not narrowed and not streamed and max(end - begin for begin, end in ranges) >= _LEAST_TOKENS:
            self._follow(_amounts(ranges), seconds)

    def seconds(self, ranges: Sequence[Range]) -> float | None:
        """Expected of computing these positions [begin, end) of a prompt; None where nothing was measured."""
        known = self._known()
        return None if known is None else float(known @ _amounts(ranges))

    def prefill_seconds(self, tokens: int) -> float | None:
        """T_prefill(``tokens``); None where nothing was measured."""
        return self.seconds([(0, tokens)])

    def urgency(self, computed: Sequence[Range], *, cached: int, decided: bool = False) -> Urgency:
        """Of loading ``cached`` tokens' KV for a prompt of which the positions ``computed`` are computed."""
        compute, prefill = self.seconds(computed), self.prefill_seconds(cached)
        if compute is None or prefill is None:
            return Urgency()
        return Urgency(compute, prefill, decided)

    def _known(self) -> np.ndarray[tuple[int], np.dtype[np.float64]] | None:
        """a and b."""
        values = self._speeds.of(self._name)
        return np.array(values) if values is not None and len(values) == 2 else None

    def _follow(self, amounts: np.ndarray[tuple[int], np.dtype[np.float64]], seconds: float) -> None:
        """One step of normalised least mean squares, in units of arithmetic: what is expected of ``amounts`` moves
        towards ``seconds`` by the weight, through a and b in proportion to the arithmetic that they stand for."""
        if seconds <= 0:
            return
        flops = self._shape * amounts
        with self._lock:
            known = self._known()
            if known is None:
                known = self._shape * seconds / flops.sum()
            else:
                error = _WEIGHT * min(1.0, amounts[0] / _USUAL_TOKENS) * (seconds - known @ amounts)
                known = np.maximum(0, known + error * self._shape * flops / (flops @ flops))
            self._speeds.note(self._name, known.tolist())


def fitted(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """a and b, not negative, of measured (tokens, seconds of their prefill): least squares of relative errors."""
    rows = np.array([_amounts([(0, tokens)]) / seconds for tokens, seconds in points])
    both = np.linalg.lstsq(rows, np.ones(len(rows)), rcond=None)[0]
    if (both >= 0).all():
        return float(both[0]), float(both[1])
    alone = rows.sum(0) / np.square(rows).sum(0)  # either one, without the other
    errors = np.square(rows * alone - 1).sum(0)
    return (float(alone[0]), 0.0) if errors[0] <= errors[1] else (0.0, float(alone[1]))


def pace_name(loaded: LoadedModel) -> str:
    """What a model's pace is remembered under: all that it depends on."""
    cuda = loaded.device.type == "cuda"
    place = torch.cuda.get_device_name(loaded.device) if cuda else f"{torch.get_num_threads()} threads of {processor()}"
    return f"prefill {loaded.fingerprint} {str(loaded.dtype).removeprefix('torch.')} {place}"


def _amounts(ranges: Sequence[Range]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Tokens and pairs of these positions."""
    tokens = sum(end - begin for begin, end in ranges)
    pairs = sum((end - begin) * (begin + end + 1) / 2 for begin, end in ranges)
    return np.array([tokens, pairs], dtype=np.float64)
