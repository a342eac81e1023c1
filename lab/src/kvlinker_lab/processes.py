"""Reads what Linux knows of a process' memory."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Literal

from kvlinker.base.errors import InvalidRequestError


def peak_memory(process: int | Literal["self"] = "self") -> int:
    """Return the most bytes of a process that were resident at once; 0 for one that has ended.

    Raises InvalidRequestError but on Linux.
    """
    if not Path("/proc/self/status").exists():
        raise InvalidRequestError(
            "Peak memory is known on Linux alone: there is no /proc/self/status here."
        )
    with suppress(FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * 1024
    return 0
