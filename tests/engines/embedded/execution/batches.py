"""Steps of a runner without an engine."""

import numpy as np

from kvlinker.engines.embedded.execution.batch import Batch, OwnTokens, Run, VisibleKV
from kvlinker.engines.embedded.execution.runner import Runner
from kvlinker.engines.embedded.kv_cache.pool import KVPool, SlotSpan


def runner_of(loaded, *, compiled=True, slots=2048):
    pool = KVPool(loaded.layers, slots, dtype=loaded.dtype, device=loaded.device)
    return Runner(loaded.model, loaded.anatomy, pool, program=loaded.program if compiled else None)


def prompt_batch(*sizes):
    """A prompt of each size from its beginning, in slots behind each other."""
    runs, begin = [], 0
    visible: dict[object, VisibleKV] = {}
    for owner, size in enumerate(sizes):
        own = np.arange(size)
        ids = np.random.default_rng(owner).integers(3, 256, size)
        visible[owner] = VisibleKV((), (SlotSpan(begin, size),), own, OwnTokens(own, ()))
        runs.append(Run(begin + own, 0, ids, True, owner=owner))
        begin += size
    return Batch(tuple(runs), visible)
