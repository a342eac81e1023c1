"""The benchmark on a tiny model reports what it promises; its figures are not looked at."""

import pytest

pytest.importorskip("vllm")

from tests.doors.http.serving import tiny_model
from typer.testing import CliRunner

from kvlinker.base.errors import InvalidRequestError
from kvlinker.cli import app
from kvlinker.llm import LLM
from kvlinker.quality.bench.harness.measurement import Workload
from kvlinker.quality.bench.harness.subject import MeasuredModel
from kvlinker.settings import load_settings
from kvlinker_vllm.ttft_benchmark import AGAIN, COLUMNS, REORDERED, run_vllm_ttft
from vllm_tests.conftest import HEAD_DIM


def test_the_command_comes_by_its_entry_point():
    shown = CliRunner().invoke(app, ["bench", "--help"], env={"COLUMNS": "200"})
    assert "ttft-vllm" in shown.output
    asked = CliRunner().invoke(app, ["bench", "ttft-vllm", "--chunks", "several"])
    assert asked.exit_code == 2
    assert "'several' is not a list of whole numbers" in asked.stderr


@pytest.mark.whole
def test_rows_say_what_was_measured(vllm_settings):
    subject = MeasuredModel(
        "tiny", "kvlinker bench …", tiny_model(head_dim=HEAD_DIM), {"repeat": 1}
    )
    policies = ["full", "naive", "legolink-4", "query-5", "cacheblend-40-onestep"]
    told: list[str] = []

    def progress(what: str, done: int = 0, total: int | None = None, /) -> None:
        told.append(what)

    rows = run_vllm_ttft(
        subject, vllm_settings, [Workload(3, 40, 9)], policies, repeat=1, progress=progress
    )
    assert [row["policy"] for row in rows] == [*policies, AGAIN, REORDERED]
    full, naive, lego, query, blend, again, reordered = rows
    assert {row["engine"] for row in rows} == {"vllm"}
    assert {row["context_tokens"] for row in rows} == {129}
    assert [row["recomputed_tokens"] for row in rows[:3]] == [120, 0, 8]
    assert query["recomputed_tokens"] == 4
    assert 8 < blend["recomputed_tokens"] < 120
    assert full["speedup"] == 1
    assert naive["speedup"] == pytest.approx(full["ttft_ms"] / naive["ttft_ms"])
    assert all(
        row[name] > 0 for row in (naive, lego) for name in ("idle_itl_ms", "itl_ms", "busy_ttft_ms")
    )
    assert all(row["ttft_ms"] > 0 and row["itl_ms"] is None for row in (again, reordered))
    assert all(name in row for row in rows for name in COLUMNS)
    assert any("blend" in text for text in told)


@pytest.mark.whole
def test_chunks_can_be_read_from_the_disk(vllm_settings):
    subject = MeasuredModel(
        "tiny", "kvlinker bench …", tiny_model(head_dim=HEAD_DIM), {"repeat": 1}
    )
    (row,) = run_vllm_ttft(
        subject, vllm_settings, [Workload(3, 40, 9)], ["naive"], repeat=1, tier="disk"
    )
    assert (row["tier"], row["recomputed_tokens"]) == ("disk", 0)
    assert row["ttft_ms"] > 0
    with pytest.raises(InvalidRequestError, match="host or disk, not from 'redis'"):
        run_vllm_ttft(
            subject, vllm_settings, [Workload(3, 40, 9)], ["naive"], repeat=1, tier="redis"
        )


@pytest.mark.whole
def test_vllm_is_measured_apart_from_the_service_beside_it(monkeypatch, tmp_path):
    subject = MeasuredModel("tiny", "kvlinker bench …", tiny_model(head_dim=HEAD_DIM), {})
    asked = []

    def refuse(settings):
        asked.append(settings)
        raise InvalidRequestError("No vLLM here.")

    monkeypatch.setattr(LLM, "from_settings", refuse)
    monkeypatch.setenv("KVLINKER_CATALOG_URL", f"sqlite:///{tmp_path}/shared.sqlite")
    monkeypatch.setenv("KVLINKER_REQUIRE_CERTIFICATE", "true")
    with pytest.raises(InvalidRequestError, match="No vLLM here"):
        run_vllm_ttft(subject, load_settings(), [Workload(1, 8, 4)], ["naive"], repeat=1)
    (settings,) = asked
    assert (settings.catalog_url, settings.require_certificate) == (None, False)
