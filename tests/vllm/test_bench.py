"""The benchmark on a tiny model reports what it promises; its figures are not looked at."""

from dataclasses import replace

import pytest

pytest.importorskip("vllm")

from kvlinker.errors import InvalidRequestError
from kvlinker.research.bench.harness.measurement import Workload
from kvlinker.research.bench.harness.subject import Subject
from kvlinker.research.bench.peers.worker import measure
from kvlinker.research.bench.vllm_ttft import AGAIN, COLUMNS, REORDERED, SMALL_STEPS, run_vllm_ttft
from tests.research.bench.test_peers import CASES, LINKED_CASES, task_for
from tests.server.serving import tiny_model
from tests.vllm.conftest import HEAD_DIM


@pytest.mark.slow
def test_rows_say_what_was_measured(vllm_settings):
    subject = Subject("tiny", "kvlinker bench …", tiny_model(head_dim=HEAD_DIM), {"repeat": 1})
    policies = ["full", "naive", "legolink-4", "query-5", "cacheblend-40-onestep"]
    told: list[str] = []

    def progress(what: str, done: int = 0, total: int | None = None, /) -> None:
        told.append(what)

    rows = run_vllm_ttft(subject, vllm_settings, [Workload(3, 40, 9)], policies, repeat=1, progress=progress)
    assert [row["policy"] for row in rows] == [*policies, AGAIN, REORDERED, SMALL_STEPS]
    full, naive, lego, query, blend, again, reordered, small = rows
    assert {row["engine"] for row in rows} == {"vllm"}
    assert {row["context_tokens"] for row in rows} == {129}
    assert [row["recomputed_tokens"] for row in rows[:3]] == [120, 0, 8]
    assert query["recomputed_tokens"] == 4
    assert 8 < blend["recomputed_tokens"] < 120
    assert full["speedup"] == 1
    assert naive["speedup"] == pytest.approx(full["ttft_ms"] / naive["ttft_ms"])
    assert all(row[name] > 0 for row in (naive, lego, small) for name in ("idle_itl_ms", "itl_ms", "busy_ttft_ms"))
    assert all(row["ttft_ms"] > 0 and row["itl_ms"] is None for row in (again, reordered))
    assert small["speedup"] == pytest.approx(full["ttft_ms"] / small["ttft_ms"])
    assert all(name in row for row in rows for name in COLUMNS)
    assert any("blend" in text for text in told)


@pytest.mark.slow
def test_vllm_is_a_peer_with_and_without_kvlinker(vllm_settings, tmp_path):
    options = vllm_settings.vllm_options
    task = task_for(tiny_model(head_dim=HEAD_DIM), tmp_path, vllm_options=options, chunk_tokens=40, policy="naive")
    alone = measure(replace(task, peer="vllm"))
    linking = measure(replace(task, peer="kvlinker-vllm"))
    assert list(alone.seconds) == CASES
    assert list(linking.seconds) == CASES + [case.replace("24", "40") for case in LINKED_CASES]
    assert alone.logprobs == pytest.approx(measure(task).logprobs, abs=1e-3)
    assert linking.logprobs is None
    assert min(*alone.seconds.values(), *linking.seconds.values()) > 0


@pytest.mark.slow
def test_chunks_can_be_read_from_the_disk(vllm_settings):
    subject = Subject("tiny", "kvlinker bench …", tiny_model(head_dim=HEAD_DIM), {"repeat": 1})
    (row,) = run_vllm_ttft(subject, vllm_settings, [Workload(3, 40, 9)], ["naive"], repeat=1, tier="disk")
    assert (row["tier"], row["recomputed_tokens"]) == ("disk", 0)
    assert row["ttft_ms"] > 0
    with pytest.raises(InvalidRequestError, match="host or disk, not from 'redis'"):
        run_vllm_ttft(subject, vllm_settings, [Workload(3, 40, 9)], ["naive"], repeat=1, tier="redis")
