"""Workers store no chunk in which numbers overflowed: whoever links it would fail."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from kvlinker.base.errors import KVLinkerError
from kvlinker.store import ChunkKV, LayerKV
from kvlinker_vllm.worker.transfer_worker import TransferWorker


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_not_stored(number):
    stored: dict[str, ChunkKV] = {}

    def put(key: str, kv: ChunkKV, *, keep: bool) -> bool:
        stored[key] = kv
        return True

    worker: Any = TransferWorker.__new__(TransferWorker)
    worker._chunks = SimpleNamespace(put=put)
    good = ChunkKV((LayerKV(torch.ones(1, 3, 4), torch.ones(1, 3, 4)),) * 2)
    assert worker._write(["good"], [good], None, keep=True)
    value = torch.ones(1, 3, 4)
    value[0, 2, 1] = number
    bad = ChunkKV((good.layers[0], LayerKV(torch.ones(1, 3, 4), value)))
    with pytest.raises(KVLinkerError, match="not all finite: layer 1"):
        worker._write(["good", "bad"], [good, bad], None, keep=True)
    assert list(stored) == ["good"]
