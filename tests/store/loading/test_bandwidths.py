"""Bandwidths: averages that follow what tiers do, and are remembered by all that they depend on."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlinker.base.events import Events
from kvlinker.store import DiskTier, Speeds
from kvlinker.store.format.codecs import find_codec
from kvlinker.store.format.encryption import Cipher
from kvlinker.store.format.sealing import sealing_of
from kvlinker.store.loading.bandwidths import DRIFT_NOTES, Bandwidths, LoadTime, TimedRead
from kvlinker.store.remote.objects import object_tier
from kvlinker.store.remote.redis import redis_tier


def noted(*rates: float) -> Bandwidths:
    bandwidths = Bandwidths()
    for rate in rates:
        bandwidths.note("disk", round(rate), 1.0)
    return bandwidths


@given(st.lists(st.integers(1, 10**12), min_size=1, max_size=30))
def test_an_average_lies_among_what_was_measured(rates: list[int]) -> None:
    average = noted(*rates).of("disk")
    assert average is not None
    assert min(rates) * (1 - 1e-9) <= average <= max(rates) * (1 + 1e-9)


def test_small_changes_are_smoothed() -> None:
    assert noted(1000, 1100).of("disk") == pytest.approx(1030)
    assert noted(1000, 1100, 900).of("disk") == pytest.approx(991)


def test_one_that_is_far_off_counts_as_any_other() -> None:
    assert noted(1000, 10_000, 3500).of("disk") == pytest.approx(3640)


def test_several_in_turn_that_are_far_off_are_believed() -> None:
    drifted = [100_000.0] * DRIFT_NOTES
    before = noted(1000, *drifted[1:]).of("disk")
    assert before is not None
    assert before < 60_000
    assert noted(1000, *drifted).of("disk") == 100_000
    assert noted(1000, *drifted, 100_100).of("disk") == pytest.approx(100_030)


def test_nothing_is_learnt_from_nothing() -> None:
    bandwidths = Bandwidths()
    bandwidths.note("disk", 0, 1.0)
    bandwidths.note("disk", 5, 0.0)
    assert bandwidths.of("disk") is None
    assert not bandwidths.fresh("disk")


def test_the_busy_share_is_averaged_too() -> None:
    bandwidths = Bandwidths()
    bandwidths.note("disk", 1000, 1.0, 0.1)
    taken = bandwidths.time([("disk", 500)])
    assert taken == LoadTime(0.5, 0.05)
    assert taken.waits
    bandwidths.note("disk", 1000, 1.0, 0.6)
    taken = bandwidths.time([("disk", 1000)])
    assert taken is not None
    assert taken.busy == pytest.approx(0.25)
    assert not taken.waits
    assert bandwidths.time([("redis", 1)]) is None


def test_threads_that_read_at_once_deliver_together() -> None:
    bandwidths = Bandwidths()
    reads = [
        TimedRead(10.0, 11.0, 0.1, 400),
        TimedRead(10.5, 11.5, 0.3, 400),
        TimedRead(12.0, 12.5, 0.1, 200),
    ]
    bandwidths.note_reads("disk", reads)
    taken = bandwidths.time([("disk", 1000)])
    assert taken is not None
    assert taken.seconds == pytest.approx(2.0), "the pause between them does not count"
    assert taken.busy == pytest.approx(2.0 * 0.5 / 2.5)
    bandwidths.note_reads("redis", [])
    assert bandwidths.of("redis") is None


def test_what_an_earlier_process_measured_is_known_but_not_fresh() -> None:
    speeds = Speeds()
    Bandwidths(speeds, {"disk": "load disk /a"}).note("disk", 500, 1.0)
    later = Bandwidths(speeds, {"disk": "load disk /a", "redis": "load redis"})
    assert later.of("disk") == 500
    assert later.known() == {"disk": 500}
    assert not later.fresh("disk")
    assert Bandwidths(speeds, {"disk": "load disk /b"}).of("disk") is None


def test_names_tell_apart_all_that_speed_depends_on(tmp_path: Path) -> None:
    def disk(folder: str, codec: str, cipher: Cipher | None = None) -> str:
        made = DiskTier(
            tmp_path / folder,
            1 << 20,
            Events(),
            codec=find_codec(codec),
            sealing=sealing_of(cipher),
        )
        return made.speed_name

    names = [
        disk("a", "raw"),
        disk("b", "raw"),
        disk("a", "int8"),
        disk("a", "raw", Cipher(bytes(32))),
    ]
    assert len(set(names)) == 4
    assert disk("a", "raw") == names[0]


def test_names_hold_no_credentials() -> None:
    redis = redis_tier("redis://user:hunter2@127.0.0.1:1/0?password=hunter2", Events())
    objects = object_tier("memory://speeds/folder?token=hunter2", 1 << 20, Events())
    for tier in (redis, objects):
        assert "hunter2" not in tier.speed_name
        assert "user" not in tier.speed_name
        tier.close()
    assert "127.0.0.1:1/0" in redis.speed_name
    assert "memory://speeds/folder" in objects.speed_name
