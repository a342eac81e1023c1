"""Samples measure tiers, beside what lies there, and leave nothing behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from kvlinker.base.types.answers import Timing
from kvlinker.prompting.segments import Prompt
from kvlinker.quality.bench.harness.measurement import FirstTokenAnswer
from kvlinker.settings import Settings, load_settings
from kvlinker.store import ChunkKV, DiskTier, HostTier, LayerKV, StoreError, Tier
from kvlinker.store.chunk_kv import ChunkState
from kvlinker.store.remote.objects import object_tier
from kvlinker.store.remote.redis import redis_tier
from kvlinker.store.tiers import ConfiguredTier
from kvlinker_lab.advice import measurement
from kvlinker_lab.advice.measurement import (
    ROUNDS,
    ProbeFailedError,
    measurable_tiers,
    measure_memory,
    measure_prefill,
    measure_tier,
)
from tests.clocks import ManualClock
from tests.redis_server import RedisServer
from tests.store.store_chunks import Recorder, chunk_kv, key_of

BUDGET = 1 << 24
SAMPLES = [chunk_kv(number, tokens=50) for number in range(3)]


def tiers(settings: Settings) -> dict[str, ConfiguredTier]:
    return {tier.name: tier for tier, _ in measurable_tiers(settings)}


def everything(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load_settings(state_dir=tmp_path / "state", object_url=f"file://{tmp_path}/objects")


@pytest.mark.parametrize("tier", ["disk", "object"])
@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_samples_are_read_back_and_leave_nothing(
    settings: Settings, tmp_path: Path, tier: str, codec: str
) -> None:
    changed = settings.model_copy(update={f"{tier}_codec": codec})
    configured = tiers(changed)[tier]
    before = everything(tmp_path)
    rounds: list[tuple[object, ...]] = []
    numbers = [
        ChunkKV((LayerKV(torch.randn(2, 50, 64), torch.randn(2, 50, 64)),) * 2) for _ in range(3)
    ]
    with configured.scratch(BUDGET) as opened:
        delivery = measure_tier(opened, numbers, progress=lambda *told: rounds.append(told))
        assert len(opened) == 3
    assert everything(tmp_path) == before
    written = [(f"{tier}: writing samples", number, 3) for number in range(3)]
    assert rounds == [
        *written,
        *((f"{tier}: reading samples", number, ROUNDS) for number in range(ROUNDS)),
    ]
    assert delivery.tokens == 150
    raw = sum(kv.nbytes for kv in numbers)
    assert delivery.nbytes > raw if codec == "raw" else delivery.nbytes < raw
    assert delivery.time.seconds > 0
    assert delivery.time.busy >= 0


def test_places_are_those_of_the_settings(settings: Settings) -> None:
    assert list(tiers(settings)) == ["disk", "object"]
    assert list(tiers(settings.model_copy(update={"disk_space": 0, "object_url": None}))) == []
    rooms = {tier.name: room for tier, room in measurable_tiers(settings)}
    assert rooms["object"] == settings.object_space // 10
    assert rooms["disk"] <= settings.disk_space // 10


def test_a_state_directory_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"cannot be used.*choose another"):
        tiers(load_settings(state_dir=tmp_path / "file" / "state"))


def test_users_chunks_stay_in_full_tiers(settings: Settings, tmp_path: Path) -> None:
    disk = DiskTier(tmp_path / "state" / "chunks", 2000, Recorder().events)
    objects = object_tier(f"file://{tmp_path}/objects", 2000, Recorder().events)
    for tier in (disk, objects):
        assert tier.put(key_of(1), chunk_kv(1))
    before = everything(tmp_path)
    for configured in tiers(settings).values():
        with configured.scratch(BUDGET) as opened:
            measure_tier(opened, SAMPLES)
    assert everything(tmp_path) == before
    assert objects.keys() == (key_of(1),)


def test_what_a_killed_process_left_is_removed(settings: Settings, tmp_path: Path) -> None:
    before = everything(tmp_path)
    old, new = tmp_path / "state" / "advise-old", tmp_path / "state" / "advise-new"
    for folder in (old, new):
        (folder / "ab").mkdir(parents=True)
    os.utime(old, (1, 1))
    left = tmp_path / "objects" / "advise" / "ab"
    left.mkdir(parents=True)
    (left / "sample.safetensors").write_bytes(b"x")
    for configured in tiers(settings).values():
        with configured.scratch(BUDGET):
            pass
    new.joinpath("ab").rmdir()
    new.rmdir()
    assert {name for name in everything(tmp_path) if name not in before} <= {"state", "objects"}


def test_memory_file_systems_are_cleared_too(settings: Settings) -> None:
    url = "memory://probing/tier"
    configured = tiers(load_settings(state_dir=settings.state_dir, disk_space=0, object_url=url))[
        "object"
    ]
    tier = object_tier(url, BUDGET, Recorder().events)
    tier.put(key_of(1), chunk_kv(1))
    with configured.scratch(BUDGET) as opened:
        measure_tier(opened, SAMPLES)
    files, root = fsspec.url_to_fs(url)
    assert [path.rpartition("/")[2] for path in files.find(root)] == [f"{key_of(1)}.safetensors"]
    tier.delete(key_of(1))


def test_redis_keeps_nothing_of_samples(redis_server: RedisServer, tmp_path: Path) -> None:
    tier = redis_tier(redis_server.url, Recorder().events)
    tier.put(key_of(1), chunk_kv(1))
    redis_server.client.set("others", "value")
    before = sorted(redis_server.client.keys())
    redis_server.client.set("kvlinker:advise:chunk:left", "by a process that was killed")
    settings = load_settings(state_dir=tmp_path, disk_space=0, redis_url=redis_server.url)
    with tiers(settings)["redis"].scratch(BUDGET) as opened:
        measure_tier(opened, SAMPLES)
        assert len(redis_server.client.keys("kvlinker:advise:chunk:*")) == len(SAMPLES)
    assert sorted(redis_server.client.keys()) == before
    assert tier.keys() == (key_of(1),)
    tier.close()


def test_a_place_that_does_not_answer_is_told(tmp_path: Path) -> None:
    settings = load_settings(state_dir=tmp_path, disk_space=0, redis_url="redis://127.0.0.1:1/0")
    with (
        tiers(settings)["redis"].scratch(BUDGET) as opened,
        pytest.raises(ProbeFailedError, match="does not answer"),
    ):
        measure_tier(opened, SAMPLES)


class Losing(HostTier):
    """Loses samples."""

    def get(self, key: str) -> ChunkKV | None:
        return None


def test_lost_samples_are_told() -> None:
    with pytest.raises(ProbeFailedError, match="gone, or damaged"):
        measure_tier(Losing(BUDGET, Recorder().events), SAMPLES)


class Disturbed(HostTier):
    """Takes a second for a sample, but ten in one of the rounds."""

    def __init__(self, disturbed: int) -> None:
        super().__init__(BUDGET, Recorder().events)
        self.clock = ManualClock()
        self.round = -1
        self.disturbed = disturbed

    def get(self, key: str) -> ChunkKV | None:
        self.clock.advance(10 if self.round == self.disturbed else 1)
        return super().get(key)


@pytest.mark.parametrize("disturbed", range(ROUNDS))
def test_a_round_that_was_disturbed_does_not_count(disturbed: int) -> None:
    tier = Disturbed(disturbed)

    def count(what: str, done: int = 0, total: int | None = None, /) -> None:
        tier.round = done if "reading" in what else -1

    delivery = measure_tier(tier, SAMPLES, progress=count, clock=tier.clock)
    assert delivery.time.seconds == len(SAMPLES)


@pytest.mark.parametrize("disturbed", range(ROUNDS))
def test_a_prefill_that_was_disturbed_does_not_count(
    monkeypatch: pytest.MonkeyPatch, disturbed: int
) -> None:
    usual = iter(
        [5.0, *(20.0 if number == disturbed else 1.0 + number / 10 for number in range(ROUNDS))]
    )
    asked = []

    def first_token(engine: object, prompt: Prompt, policy: str) -> FirstTokenAnswer:
        asked.append((len(prompt), policy))
        return FirstTokenAnswer(0.0, Timing(link=next(usual)))

    monkeypatch.setattr(measurement, "first_token", first_token)
    engine: Any = None
    assert 1.0 <= measure_prefill(engine, 100, 80) <= 1.2
    assert asked == [(10, "full"), *[(80, "full")] * ROUNDS]


class StoppedError(Exception):
    """Raised to stop a measurement."""


@pytest.mark.parametrize("when", range(len(SAMPLES) + ROUNDS))
def test_stopping_ends_it_and_leaves_nothing(settings: Settings, tmp_path: Path, when: int) -> None:
    for configured in tiers(settings).values():
        before = everything(tmp_path)
        checks = iter(range(len(SAMPLES) + ROUNDS))

        def check(checks: Iterator[int] = checks) -> None:
            if next(checks) == when:
                raise StoppedError

        with pytest.raises(StoppedError), configured.scratch(BUDGET) as opened:
            measure_tier(opened, SAMPLES, check)
        assert everything(tmp_path) == before


def test_memory_is_copied() -> None:
    delivery = measure_memory(SAMPLES, torch.device("cpu"))
    assert delivery.nbytes == sum(kv.nbytes for kv in SAMPLES)
    assert delivery.time.seconds > 0


def test_any_tier_can_be_measured() -> None:
    tier: Tier = HostTier(BUDGET, Recorder().events)
    assert measure_tier(tier, SAMPLES).nbytes == sum(kv.nbytes for kv in SAMPLES)


def test_samples_of_hybrids_have_their_states() -> None:
    """They are copied whole: what a chunk's tokens do to a state is as large for short ones."""
    plain = chunk_kv(7, tokens=200)
    state = ChunkState(torch.zeros(5, 8), (torch.zeros(5, 2),))
    sample = replace(plain, states=(state,))
    (copy,) = measurement._samples(sample, 150, BUDGET)
    assert (copy.tokens, copy.nbytes) == (200, sample.nbytes)
    assert copy.states[0].mixed is not state.mixed
    assert measure_memory([copy], torch.device("cpu")).nbytes == sample.nbytes
    (shorter,) = measurement._samples(plain, 150, plain.nbytes // 2)
    assert shorter.tokens == 100
    assert not measurement._samples(sample, 150, sample.nbytes // 2)
