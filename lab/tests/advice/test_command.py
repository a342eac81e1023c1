"""``kvlinker-lab advise`` on a tiny model: what it prints, keeps, and leaves behind."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kvlinker.engines.contract.model_files import choose_device, choose_dtype
from kvlinker.llm import LLM
from kvlinker.quality.bench.harness import shapes
from kvlinker.settings import load_settings
from kvlinker.store import ChunkKV, Tier
from kvlinker.store.tiers import configured
from kvlinker.store.tiers.disk import ConfiguredDisk
from kvlinker_lab.advice import measurement
from kvlinker_lab.cli import app

OPTIONS = ["--shape", "tiny", "--context-tokens", "96", "--disk-space", "64MiB"]


@pytest.fixture(autouse=True, scope="module")
def _one_model() -> Iterator[None]:
    """All commands measure the same random model, which is made once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shapes, "random_model", cache(shapes.random_model))
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def advise(folder: Path, *arguments: str) -> Result:
    places = ["--state-dir", str(folder / "state"), "--object-url", f"file://{folder}/objects"]
    return CliRunner().invoke(app, ["advise", *OPTIONS, *places, *arguments])


def left(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_tiers_are_measured_and_the_cheapest_is_recommended(folder: Path) -> None:
    result = advise(
        folder, "--json", str(folder / "r.json"), "--price", "host=9", "--price", "disk=8"
    )
    assert result.exit_code == 0, result.output
    assert left(folder) == {"state", "r.json"}
    content = json.loads((folder / "r.json").read_text())
    rows = {row["tier"]: row for row in content["results"]}
    assert list(rows) == ["host", "disk", "object"]
    assert [row["price_gb_month"] for row in rows.values()] == [9, 8, 0.023]
    settings = content["settings"]
    assert (settings["policy"], settings["percent"], settings["context_tokens"]) == (
        "cacheblend-15",
        15,
        96,
    )
    assert settings["prefill_ms"] > 0
    for row in rows.values():
        assert row["load_ms"] == pytest.approx(
            1e3 * 96 * row["bytes_per_token"] / (1e6 * row["mb_per_s"])
        )
        assert row["hidden"] == (row["added_ms"] == 0)
        assert not row["hidden"] or row["load_ms"] <= row["recompute_ms"]
        assert row["price_million_tokens_month"] == pytest.approx(
            row["price_gb_month"] * row["bytes_per_token"] * 1e6 / 1e9
        )
        assert row["tier"] in result.output
    recommended = [row for row in rows.values() if row["recommended"]]
    hidden = [row for row in rows.values() if row["hidden"]]
    assert recommended == sorted(hidden, key=lambda row: row["price_million_tokens_month"])[:1]
    assert ("Recommended: " in result.output) == bool(hidden)


def test_users_chunks_are_not_touched(folder: Path) -> None:
    device = choose_device("auto")
    loaded = shapes.random_model("tiny", dtype=choose_dtype("auto", device), device=device)
    options: dict[str, Any] = {
        "state_dir": folder / "state",
        "object_url": f"file://{folder}/objects",
    }
    with LLM.from_model(loaded, load_settings(**options)) as llm:
        llm.generate_context_cache(["some text that is cached", "and some more"])
        llm.store.flush()
    chunks = {path: path.read_bytes() for path in folder.rglob("*.safetensors")}
    assert len(chunks) == 4
    assert advise(folder).exit_code == 0
    assert {path: path.read_bytes() for path in folder.rglob("*.safetensors")} == chunks


@pytest.mark.parametrize(
    ("policy", "percent"),
    [("legolink-4", None), ("query-12.5", 12.5), ("cacheblend-auto", 15), ("naive", 0)],
)
def test_any_policy_has_a_ratio(folder: Path, policy: str, percent: float | None) -> None:
    result = advise(folder, "--policy", policy, "--json", str(folder / "r.json"))
    assert result.exit_code == 0, result.output
    settings = json.loads((folder / "r.json").read_text())["settings"]
    assert settings["policy"] == policy
    assert settings["percent"] == (
        percent if percent is not None else pytest.approx(100 * 4 / 64, abs=0.1)
    )


def test_where_nothing_hides_the_ways_out_are_told(folder: Path) -> None:
    result = advise(folder, "--policy", "naive")
    assert result.exit_code == 0, result.output
    assert "naive recomputes 0% of 96 tokens" in result.output
    assert "No tier's loading is hidden" in result.output
    assert "\n- " in result.output


def test_a_tier_that_cannot_be_measured_is_told_and_the_others_are(folder: Path) -> None:
    result = advise(
        folder, "--redis-url", "redis://user:hunter2@127.0.0.1:1/0", "--host-memory", "10kB"
    )
    assert result.exit_code == 0, result.output
    assert "tier redis was not measured: it did not take the samples" in result.stderr
    assert "tier host was not measured: its budget" in result.stderr
    assert "object" in result.output
    assert "hunter2" not in result.output + result.stderr


class ConfiguredArchive(ConfiguredDisk):
    """A tier of another package, with room for samples on the disk."""

    name = "archive"
    rank = 25
    settings = ()  # type: ignore[assignment]


def test_tiers_of_other_packages_are_measured_at_their_price(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(configured._registry._values, "archive", ConfiguredArchive)
    monkeypatch.setenv("KVLINKER_TIERS", '{"archive": {}}')
    result = advise(folder)
    assert result.exit_code == 0, result.output
    assert (
        "archive was not measured: its price is not known: give --price archive=" in result.stderr
    )
    result = advise(folder, "--price", "archive=0.01", "--json", str(folder / "r.json"))
    assert result.exit_code == 0, result.output
    rows = json.loads((folder / "r.json").read_text())["results"]
    assert [row["price_gb_month"] for row in rows if row["tier"] == "archive"] == [0.01]


def test_without_any_tier_it_fails(folder: Path) -> None:
    result = advise(folder, "--disk-space", "0", "--host-memory", "0", "--object-space", "0")
    assert result.exit_code == 1
    assert "no tier was measured" in result.stderr


BAD_ARGUMENTS = [
    (["--price", "tape=3"], "Unknown tier 'tape'"),
    (["--price", "disk=cheap"], "'cheap' is no price"),
    (["--policy", "blend"], "Unknown policy"),
    (["--shape", "9b"], "Unknown shape"),
    (["--context-tokens", "70000"], "the model takes 65536"),
    (["--disk-codec", "int3"], "disk-codec"),
    (["--json", "/no/such/folder/r.json"], "there is no folder"),
]


def test_bad_arguments_end_with_one_clear_line(folder: Path, subtests: pytest.Subtests) -> None:
    for arguments, message in BAD_ARGUMENTS:
        with subtests.test(" ".join(arguments)):
            result = advise(folder, *arguments)
            assert result.exit_code == 2
            assert message in result.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("reached", ["disk", "object"])
def test_an_interrupt_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, reached: str
) -> None:
    """It comes while a call to the tier is under way, which goes on."""
    measure_tier = measurement.measure_tier
    seen = []

    def interrupted(tier: Tier, samples: Sequence[ChunkKV], *others: Any) -> Any:
        if tier.name == reached:
            seen.append(tier.name)
            os.kill(os.getpid(), number)
            assert tier.put("0" * 64, samples[0])
        return measure_tier(tier, samples, *others)

    monkeypatch.setattr(measurement, "measure_tier", interrupted)
    previous = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell's background jobs ignore it
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    try:
        result = advise(folder)
        after = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    finally:
        signal.signal(signal.SIGINT, previous)
    assert seen == [reached]
    assert result.exit_code not in (0, 2)
    assert left(folder) == {"state"}
    assert after == handlers
