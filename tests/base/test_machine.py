"""What a process may use is what its control group, and those around it, leave of the machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from kvlinker.base import machine
from kvlinker.base.machine import ControlGroup
from kvlinker.base.threads import set_threads
from kvlinker.settings import load_settings

GIB = 2**30
UNLIMITED = "9223372036854771712"
V2 = "0::/pod/server\n"
V1 = "7:blkio:/pod/server\n4:memory:/pod/server\n1:cpu,cpuacct:/pod/server\n"


def group(folder: Path, membership: str, files: Mapping[str, object]) -> ControlGroup:
    """A control group of these files."""
    (folder / "cgroup").write_text(membership)
    for name, content in files.items():
        path = folder / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return ControlGroup(folder / "cgroup", folder / "root")


MEMORIES: dict[str, tuple[str, dict[str, object], int | None, int | None]] = {
    "version 2": (
        V2,
        {"pod/server/memory.max": 4 * GIB, "pod/server/memory.current": 3 * GIB},
        4 * GIB,
        GIB,
    ),
    "files that make room": (
        V2,
        {
            "pod/server/memory.max": 4 * GIB,
            "pod/server/memory.current": 3 * GIB,
            "pod/server/memory.stat": f"anon {GIB}\ninactive_file {2 * GIB}\nactive_file 0",
        },
        4 * GIB,
        3 * GIB,
    ),
    "a group around it": (
        V2,
        {
            "pod/server/memory.max": "max",
            "pod/memory.max": 8 * GIB,
            "pod/memory.current": 9 * GIB,
            "memory.max": 16 * GIB,
        },
        8 * GIB,
        0,
    ),
    "a container at the root": ("0::/\n", {"memory.max": GIB, "memory.current": 0}, GIB, GIB),
    "version 1": (
        V1,
        {
            "memory/pod/server/memory.limit_in_bytes": 4 * GIB,
            "memory/pod/server/memory.usage_in_bytes": 2 * GIB,
            "memory/pod/server/memory.stat": f"inactive_file 0\ntotal_inactive_file {GIB}",
            "memory/memory.limit_in_bytes": UNLIMITED,
            "memory/memory.usage_in_bytes": 99 * GIB,
        },
        4 * GIB,
        3 * GIB,
    ),
    "version 1, seen from inside": (V1, {"memory/memory.limit_in_bytes": GIB}, GIB, GIB),
    "both versions": (V1 + V2, {"unified/pod/server/cpu.max": "max 100000"}, None, None),
    "no limit": (
        V2,
        {"pod/server/memory.max": "max", "pod/server/memory.current": GIB},
        None,
        None,
    ),
    "no groups": ("", {}, None, None),
}


@pytest.mark.parametrize("case", MEMORIES)
def test_memory(tmp_path: Path, case: str) -> None:
    membership, files, limit, left = MEMORIES[case]
    found = group(tmp_path, membership, files)
    assert (found.memory(), found.remaining_memory()) == (limit, left)


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        (V2, {"pod/server/cpu.max": "250000 100000"}, 2.5),
        (V2, {"pod/server/cpu.max": "max 100000", "pod/cpu.max": "400000 100000"}, 4.0),
        (V2, {"pod/server/cpu.max": "max 100000"}, None),
        (
            V1,
            {
                "cpu,cpuacct/pod/server/cpu.cfs_quota_us": 50000,
                "cpu,cpuacct/pod/server/cpu.cfs_period_us": 100000,
            },
            0.5,
        ),
        (V1, {"cpu/cpu.cfs_quota_us": 300000, "cpu/cpu.cfs_period_us": 100000}, 3.0),
        (V1, {"cpu/cpu.cfs_quota_us": -1, "cpu/cpu.cfs_period_us": 100000}, None),
        (V2, {"pod/server/cpu.max": "nonsense"}, None),
    ],
)
def test_processors(
    tmp_path: Path, membership: str, files: dict[str, object], expected: float | None
) -> None:
    assert group(tmp_path, membership, files).processors() == expected


def test_the_machine_is_the_limit_where_a_group_allows_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(6)))
    generous = {"pod/server/memory.max": 2**60, "pod/server/cpu.max": "9900000 100000"}
    found = group(tmp_path, V2, generous)
    assert machine.memory(found) == psutil.virtual_memory().total
    assert machine.available_memory(found) < 2**59
    assert machine.processors(found) == 6
    for quota, expected in (("250000", 2), ("50000", 1), ("max", 6)):
        assert (
            machine.processors(group(tmp_path, V2, {"pod/server/cpu.max": f"{quota} 100000"}))
            == expected
        )


def test_defaults_go_by_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ControlGroup, "memory", lambda group: GIB)
    assert load_settings().host_memory == GIB // 4
    taken: list[int] = []
    monkeypatch.setattr("torch.set_num_threads", taken.append)
    monkeypatch.setattr("torch.get_num_threads", lambda: 8)
    monkeypatch.setattr(machine, "processors", lambda: 3)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    set_threads(None)
    set_threads(5)
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    set_threads(None)
    assert taken == [3, 5]
