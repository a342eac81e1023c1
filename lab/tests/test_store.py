"""The store's benchmark runs on a tiny model and reports what it promises; its figures are not
looked at."""

import pytest
from typer.testing import CliRunner

from kvlinker.base.errors import InvalidRequestError
from kvlinker.quality.bench.harness.measurement import Workload
from kvlinker.quality.bench.harness.subject import MeasuredModel
from kvlinker_lab.cli import app
from kvlinker_lab.store.cases import run_store
from kvlinker_lab.store.hiding import LOAD_TO_COMPUTE
from kvlinker_lab.store_benchmark import plot_store
from tests.toy_models import loaded_model

CODECS = ["raw", "int8"]


@pytest.fixture
def subject():
    return MeasuredModel("llama", "kvlinker bench …", loaded_model("llama"), {"repeat": 1})


def measured(subject, *cases, policies=("naive",), tiers=("disk",), **options):
    workload = Workload(3, 30, 5)
    return run_store(
        subject,
        workload,
        policies=policies,
        tiers=tiers,
        codecs=CODECS,
        entries=300,
        cases=cases,
        repeat=1,
        **options,
    ).rows


def test_every_tier_and_codec_is_set_beside_the_host(subject, tmp_path):
    rows = measured(subject, "ttft", policies=["naive", "legolink-4"])
    assert [(r["tier"], r["codec"], r["policy"]) for r in rows if r["case"].startswith("time")] == [
        (tier, codec, policy)
        for policy in ("naive", "legolink-4")
        for tier, codec in (
            ("host", ""),
            ("disk", "raw"),
            ("disk", "raw"),
            ("disk", "int8"),
            ("disk", "int8"),
        )
    ]
    host = rows[0]
    assert host["ratio_to_host"] == 1
    for row in rows[1 : len(rows) // 2]:
        assert row["ratio_to_host"] == pytest.approx(row["ms"] / host["ms"])
        assert row["beside"]
    sizes = {codec: {row["bytes"] for row in rows if row["codec"] == codec} for codec in CODECS}
    assert all(len(found) == 1 for found in sizes.values())
    assert min(sizes["int8"]) < min(sizes["raw"])
    plot_store(rows, tmp_path / "store.svg")
    assert "load, then compute, cold" in (tmp_path / "store.svg").read_text()


def test_shared_tiers_take_part_and_are_left_as_they_were(subject, redis_server):
    rows = measured(subject, "ttft", tiers=["redis", "object"], redis_url=redis_server.url)
    assert [(r["tier"], r["codec"]) for r in rows if r["case"].startswith("time")] == [
        ("host", ""),
        *((tier, codec) for tier in ("redis", "object") for codec in CODECS),
    ]
    assert not list(redis_server.client.scan_iter("*:chunk:*"))


def test_what_layer_wise_loading_hides_is_measured_at_several_bandwidths(subject, redis_server):
    rows = measured(subject, "hiding", redis_url=redis_server.url)
    assert [(row["tier"], row["codec"]) for row in rows] == [("redis", "raw")] * len(
        LOAD_TO_COMPUTE
    ) + [("disk", "raw")]
    bandwidths = [row["bandwidth"] for row in rows]
    assert bandwidths[:-1] == sorted(bandwidths[:-1], reverse=True)
    for row in rows:
        hidden = (
            100
            * (row["load_ms"] + row["compute_ms"] - row["ms"])
            / min(row["load_ms"], row["compute_ms"])
        )
        assert row["hidden_percent"] == pytest.approx(hidden)  # of one turn
        assert row["hidden_percent_range"] == pytest.approx([hidden, hidden])
        assert row["ratio_to_host"] == pytest.approx(row["ms"] / row["compute_ms"])
        assert row["beside"] == "load, then compute"
        assert row["ratio"] == pytest.approx(row["ms"] / (row["load_ms"] + row["compute_ms"]))
    assert not list(redis_server.client.scan_iter("*:chunk:*"))


def test_hiding_needs_a_redis_server(subject):
    with pytest.raises(InvalidRequestError, match="give --redis-url"):
        measured(subject, "hiding")


def test_requests_beside_writes_are_compared_with_requests_alone(subject):
    (row,) = measured(subject, "writing")
    assert row["beside"] == "without writes"
    assert row["bytes"] > 0
    assert row["ratio"] == row["ratio_to_host"] > 0


def test_puts_and_gets_are_compared_with_plain_files(subject):
    rows = measured(subject, "throughput")
    assert [(row["codec"], row["case"]) for row in rows] == [
        (c, case) for c in CODECS for case in ("put", "get")
    ]
    assert all(row["ratio"] > 0 for row in rows)


def test_many_chunks_cost_what_is_measured(subject):
    rows = measured(subject, "crowd")
    assert {row["case"] for row in rows} >= {
        "create, among 300",
        "delete, among 300",
        "open, with 300 chunks",
    }
    (memory,) = (row for row in rows if row["case"].startswith("memory"))
    assert 10 < memory["bytes"] < 10_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cases", "ttft,speed"], "Unknown case 'speed'"),
        (["--codecs", "zip"], "Unknown codec"),
        (["--cases", "ttft", "--tiers", "tape"], "Unknown tier 'tape'"),
        (["--cases", "ttft", "--tiers", "redis"], "--redis-url"),
        (["--plot", "/nowhere/plot.png"], "no folder"),
        (
            ["--cases", "hiding", "--redis-url", "redis://:secret@127.0.0.1:1"],
            "No Redis server answers at redis://127.0.0.1:1: ",
        ),
    ],
)
def test_bad_arguments_end_with_one_clear_line(arguments, message):
    result = CliRunner().invoke(app, ["store", "--shape", "tiny", *arguments])
    assert result.exit_code == 2
    told = " ".join(result.stderr.split())
    assert message in told
    assert "secret" not in told
