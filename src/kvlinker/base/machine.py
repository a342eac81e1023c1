"""Finds how much memory and how many processors this process may use: the machine's, or less in a
container."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath

import psutil


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """Reads the limits of this process's control group (cgroup), of version 1 or 2, and of the
    groups around it.

    Unreadable values limit nothing: there is no such file in a system without control groups.
    """

    membership: Path = Path("/proc/self/cgroup")
    """The file that names the groups, each in a line ``number:controllers:path``, without
    controllers in version 2."""

    root: Path = Path("/sys/fs/cgroup")
    """The folder of all groups."""

    def memory(self) -> int | None:
        """Return the bytes that may be used in all; None for no limit."""
        return min((limit for limit, _ in self._memories()), default=None)

    def remaining_memory(self) -> int | None:
        """Return the bytes that may still be used, where files that were read but are not in use
        make room; None for no limit."""
        return min((max(limit - used, 0) for limit, used in self._memories()), default=None)

    def processors(self) -> float | None:
        """Return the usable processor time in processors, which may be a fraction; None for no
        limit."""
        shares = []
        for folder in self._folders("cpu"):
            quota, _, period = _text(folder / "cpu.max").partition(" ")
            quota = quota or _text(folder / "cpu.cfs_quota_us")
            period = period or _text(folder / "cpu.cfs_period_us")
            if quota.isdecimal() and period.isdecimal() and int(period):
                shares.append(int(quota) / int(period))
        return min(shares, default=None)

    def _memories(self) -> Iterator[tuple[int, int]]:
        """Yield each group's limit of memory, and its use without reclaimable files, in bytes."""
        names = (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        )
        for folder in self._folders("memory"):
            for limit, usage, reclaimable in names:
                if (most := _text(folder / limit)).isdecimal():
                    statistics = dict(
                        line.split(" ", 1) for line in _text(folder / "memory.stat").splitlines()
                    )
                    used = int(_text(folder / usage) or 0) - int(statistics.get(reclaimable, 0))
                    yield int(most), used

    def _folders(self, controller: str) -> Iterator[Path]:
        """Yield where the files of this process's group may be, and those of the groups around it.

        A container may see itself at the root although its group is named by its path on the host.
        """
        for line in _text(self.membership).splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            place = PurePath(path.lstrip("/"))
            for mount in (controllers, controller) if controllers else ("", "unified"):
                for group in (place, *place.parents):
                    yield self.root / mount / group


def memory(group: ControlGroup = ControlGroup()) -> int:
    """Return the bytes of memory that this process may use: the machine's, or what its control
    group is limited to."""
    return _least(psutil.virtual_memory().total, group.memory())


def available_memory(group: ControlGroup = ControlGroup()) -> int:
    """Return the bytes of memory that are left for this process."""
    return _least(psutil.virtual_memory().available, group.remaining_memory())


def processors(group: ControlGroup = ControlGroup()) -> int:
    """Return the number of processors that this process may use at once, at least 1: those that it
    may run on, or fewer by its control group's share of time. Fractions are rounded down, because
    threads that compute together wait for the thread that has used up its share."""
    usable = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    share = group.processors()
    return usable if share is None else max(1, min(usable, int(share)))


def _least(amount: int, limit: int | None) -> int:
    return amount if limit is None else min(amount, limit)


def _text(path: Path) -> str:
    """Return a file's text without space around it; nothing if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
