"""The benchmark on a tiny model reports what it promises; its figures are not looked at."""

import pytest

pytest.importorskip("vllm")

from kvlinker.research.bench.measurement import Workload
from kvlinker.research.bench.subject import Subject
from kvlinker.research.bench.vllm_ttft import COLUMNS, run_vllm_ttft
from tests.server.serving import tiny_model
from tests.vllm.conftest import HEAD_DIM


@pytest.mark.slow
def test_rows_say_what_was_measured(vllm_settings):
    subject = Subject("tiny", "kvlinker bench …", tiny_model(head_dim=HEAD_DIM), {"repeat": 1})
    policies = ["full", "naive", "legolink-4", "cacheblend-40-onestep"]
    told: list[str] = []

    def progress(what: str, done: int = 0, total: int | None = None, /) -> None:
        told.append(what)

    rows = run_vllm_ttft(subject, vllm_settings, [Workload(3, 40, 9)], policies, repeat=1, progress=progress)
    assert [row["policy"] for row in rows] == policies
    full, naive, lego, blend = rows
    assert {row["engine"] for row in rows} == {"vllm"}
    assert {row["context_tokens"] for row in rows} == {129}
    assert [row["recomputed_tokens"] for row in rows[:3]] == [120, 0, 8]
    assert 8 < blend["recomputed_tokens"] < 120
    assert full["speedup"] == 1
    assert naive["speedup"] == pytest.approx(full["ttft_ms"] / naive["ttft_ms"])
    assert all(row[name] > 0 for row in (naive, lego) for name in ("idle_itl_ms", "itl_ms", "busy_ttft_ms"))
    assert all(name in row for row in rows for name in COLUMNS)
    assert any("blend" in text for text in told)
