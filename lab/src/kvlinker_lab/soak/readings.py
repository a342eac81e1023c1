"""Looks at a server from outside: what its processes take, what lies on its disk, and what its
metrics say."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from prometheus_client.parser import text_string_to_metric_families

from kvlinker_lab.load.servers import Server, resident_bytes


@dataclass(frozen=True, slots=True)
class ResourceUsage:
    """Holds what a server takes at one moment, with the processes that it started."""

    memory_bytes: int
    """Resident memory."""
    descriptors: int
    """Open file descriptors."""
    threads: int
    disk_bytes: int
    """Bytes of all files in the state directory."""

    @classmethod
    def by(cls, server: Server) -> ResourceUsage:
        """Look at a server whose process and state directory are known."""
        assert server.process is not None
        assert server.state_dir is not None
        descriptors = threads = 0
        for process in (server.process, *server.process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                descriptors += process.num_fds()
                threads += process.num_threads()
        return cls(
            resident_bytes(server.process), descriptors, threads, sum(file_sizes(server.state_dir))
        )


def file_sizes(folder: Path, pattern: str = "*") -> list[int]:
    """Return the sizes in bytes of all files in a folder and its folders whose names have the
    pattern."""
    sizes = []
    for path in folder.rglob(pattern):
        with suppress(FileNotFoundError):
            if path.is_file():
                sizes.append(path.stat().st_size)
    return sizes


@dataclass(frozen=True, slots=True)
class Figures:
    """Holds what a server's metrics said at one moment."""

    values: Mapping[tuple[str, frozenset[tuple[str, str]]], float]
    """Each sample's value, by its name and its labels."""

    @classmethod
    def read(cls, exposition: str) -> Figures:
        """Read Prometheus' text format."""
        return cls(
            {
                (sample.name, frozenset(sample.labels.items())): sample.value
                for family in text_string_to_metric_families(exposition)
                for sample in family.samples
            }
        )

    def total(self, name: str, **labels: str) -> int:
        """Return the sum of a metric's samples that have these labels; 0 where there are none."""
        return int(
            sum(
                value
                for (found, has), value in self.values.items()
                if found == f"kvlinker:{name}" and has >= labels.items()
            )
        )

    @property
    def busy(self) -> bool:
        """True while requests run or wait, hold slots, or are to be audited."""
        gauges = ("requests_running", "requests_waiting", "kv_slots_used", "audit_pending")
        return any(self.total(gauge) for gauge in gauges)
