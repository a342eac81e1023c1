"""Lets only one thread of the process, the engine's, compute in parallel, in as many threads as it
may use.

GNU's OpenMP, which comes with PyTorch, gives a pool of workers to every thread that computes in
parallel, and keeps it until that thread ends. As soon as the pools have more threads together than
there are processors, their workers stop spinning between the regions of parallel code and sleep.
Waking them in each of the several hundred regions of a decode step takes a large part of it.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from kvlinker.base import machine

P = ParamSpec("P")
R = TypeVar("R")


def set_threads(count: int | None) -> None:
    """Have PyTorch compute in ``count`` threads. None means as many as it takes by itself, but no
    more than there are processors for this process, unless the variable ``OMP_NUM_THREADS`` says
    how many."""
    import torch

    if count is None and "OMP_NUM_THREADS" not in os.environ:
        count = min(torch.get_num_threads(), machine.processors())
    if count is not None:
        torch.set_num_threads(count)


def compute_serially() -> None:
    """Have PyTorch, and MKL in it, use one processor in the calling thread, and in no other: it
    makes no pool there.

    Thread pools that PyTorch was built without, or hides, are left as they are.
    """
    import torch

    torch.get_num_threads()  # a thread's first question sets its number of threads; ours is to stay
    _set_own_threads(1, 1)


@contextmanager
def serially() -> Iterator[None]:
    """Have PyTorch, and MKL in it, use one processor in the calling thread for a while: on a busy
    machine, threads of small computations wait for each other much longer than they compute."""
    import torch

    before = torch.get_num_threads()
    _set_own_threads(1, 1)
    try:
        yield
    finally:
        _set_own_threads(before, 0)


def _set_own_threads(openmp: int, mkl: int) -> None:
    """Set the numbers of threads of the calling thread; 0 is MKL's own choice."""
    import torch

    libraries = ctypes.CDLL(torch._C.__file__)  # what it was linked with, too
    for name, count in (("omp_set_num_threads", openmp), ("MKL_Set_Num_Threads_Local", mkl)):
        set_threads = getattr(libraries, name, None)
        if set_threads is not None:
            set_threads(count)


def in_own_thread(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap ``function`` so that it runs in a thread of its own, which has ended, its pool with it,
    when the call returns."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with ThreadPoolExecutor(1, thread_name_prefix="kvlinker-alone") as thread:
            return thread.submit(function, *args, **kwargs).result()

    return call
