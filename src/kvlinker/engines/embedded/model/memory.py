"""Returns the memory of weights that are not needed any more, or not for now, to the system, on
Linux; elsewhere it does nothing.

A model's plain weights lie in its files, which are mapped into memory, or in memory of the C
library. Both would keep what was read or freed: a model would take twice its size while its weights
are packed one after another.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kvlinker.engines.embedded.model.weights.coded import CodedWeight

_MAPPINGS = Path("/proc/self/maps")
_PAGES = Path("/proc/self/smaps")

CHANGED = ("Anonymous", "Swap")
"""The kinds of pages that a file mapped for this process alone has where they were written to."""


def drop_mapped(weight: Tensor, files: Collection[range] | None = None) -> None:
    """Drop a weight that is no longer read from memory, if it is in one of the mapped ``files``;
    without these, any."""
    if _inside(weight, mapped_files() if files is None else files):
        _drop(weight)


def drop_unread(model: nn.Module) -> None:
    """Drop the weights of ``model`` that are as in their mapped files from memory; what is read of
    them comes from the system's cache of files again."""
    files = _unchanged_files()
    for weight in model.parameters():
        if _inside(weight, files):
            _drop(weight)


@contextmanager
def dropping_mapped(model: nn.Module) -> Iterator[None]:
    """Drop what a module of ``model`` has of mapped files from memory each time that it has run, so
    that a pass needs the memory of one module's weights at a time. Nothing may write to weights
    meanwhile."""
    files = _unchanged_files()
    with ExitStack() as hooks:
        for module in model.modules() if files else ():
            own = [each for each in module.parameters(recurse=False) if _inside(each, files)]
            if own:
                hooks.enter_context(module.register_forward_hook(partial(_drop_all, own)))
        yield


def _drop_all(weights: Sequence[Tensor], *_: Any) -> None:
    for weight in weights:
        _drop(weight)


def _drop(weight: Tensor) -> None:
    """Drop the pages of a weight in a file that it does not share with its neighbours."""
    begin, end = weight.data_ptr(), weight.data_ptr() + weight.nbytes
    first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
    last = end // mmap.PAGESIZE * mmap.PAGESIZE
    if first < last:
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED
        )


def _inside(weight: Tensor, files: Collection[range]) -> bool:
    if not weight.is_cpu or weight.layout != torch.strided or isinstance(weight, CodedWeight):
        return False  # those of oneDNN, and those in codes, have no numbers of their own
    begin, end = weight.data_ptr(), weight.data_ptr() + weight.nbytes
    return any(file.start <= begin and end <= file.stop for file in files)


def mapped_files() -> list[range]:
    """Return the addresses to which files are mapped, for this process alone. Dropping would empty
    other memory."""
    if not _MAPPINGS.exists():
        return []
    found = (_file_at(line) for line in _MAPPINGS.read_text().splitlines())
    return [file for file in found if file is not None]


def _unchanged_files() -> list[range]:
    """Return those of ``mapped_files`` that were not written to: dropping would undo that."""
    unchanged: list[range] = []
    is_file = False
    for line in _PAGES.read_text().splitlines() if _PAGES.exists() else ():
        name, _, value = line.partition(":")
        if " " in name:  # addresses, which begin what is known of a mapping
            if (file := _file_at(line)) is not None:
                unchanged.append(file)
            is_file = file is not None
        elif name in CHANGED and is_file and value.split()[0] != "0":
            unchanged.pop()
            is_file = False
    return unchanged


def _file_at(mapping: str) -> range | None:
    """Return the addresses that a line of the system's list maps a file to, for this process alone;
    None for other memory."""
    addresses, permissions, _, _, inode, *_ = mapping.split(maxsplit=5)
    low, high = (int(address, 16) for address in addresses.split("-"))
    return range(low, high) if int(inode) > 0 and permissions.endswith("p") else None


def return_freed() -> None:
    """Return the memory that GNU's C library keeps for later: the holes between weights that were
    freed."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
