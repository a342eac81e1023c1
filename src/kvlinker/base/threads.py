"""Lets only the engine's thread of this process compute in parallel.

GNU's OpenMP, which comes with PyTorch, gives a pool of workers to every thread that computes in
parallel, and keeps it until that thread ends. As soon as the pools have more threads together than
there are processors, their workers stop spinning between the regions of parallel code and sleep.
Waking them in each of the several hundred regions of a decode step takes a large part of it.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from kvlinker.base import machine

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

SPINS_VARIABLE, WAITING_VARIABLE = "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"
"""The variables by which GNU's OpenMP decides, when it is loaded, how threads wait for one another:
after how many turns they sleep, or that they always or never do so at once."""

SPINS = 1000
"""The turns of OpenMP's waiting loop after which a thread sleeps; chosen by hand. By default a
thread spins for milliseconds: on a busy machine it spins on the processor that the other thread
needs."""


def _waits_without_end() -> bool:
    """Return whether waiting threads spin for long: the environment did not limit that before
    OpenMP was loaded. Only Linux comes with GNU's OpenMP."""
    return sys.platform == "linux" and not {SPINS_VARIABLE, WAITING_VARIABLE} & os.environ.keys()


def bound_spinning() -> None:
    """Let waiting threads sleep after ``SPINS`` turns. A value in the environment takes precedence.
    Call it before PyTorch is imported: the environment of this process and of those that it starts
    is changed, which OpenMP reads when it is loaded."""
    if _waits_without_end():
        os.environ[SPINS_VARIABLE] = str(SPINS)


def set_threads(count: int | None) -> None:
    """Set the number of PyTorch's threads to ``count``. None means PyTorch's default, limited to
    the processors of this process; the variable ``OMP_NUM_THREADS`` overrides the limit. Where
    waiting threads spin for long on a busy machine, the log names the variable to set."""
    import torch

    if _waits_without_end() and os.getloadavg()[0] > machine.processors():
        logger.warning(
            "This machine does more than it has processors for, and threads that wait for one"
            " another keep processors busy. Set %s=%d before Python starts: answers come several"
            " times as fast then. The command kvlinker does it.",
            SPINS_VARIABLE,
            SPINS,
        )
    if count is None and "OMP_NUM_THREADS" not in os.environ:
        count = min(torch.get_num_threads(), machine.processors())
    if count is not None:
        torch.set_num_threads(count)


def compute_serially() -> None:
    """Limit PyTorch and MKL to one processor in the calling thread alone, which then gets no pool.

    Thread pools that PyTorch was built without, or hides, are left as they are.
    """
    import torch

    torch.get_num_threads()  # a thread's first question sets its number of threads; ours is to stay
    _set_own_threads(1, 1)


@contextmanager
def serially() -> Iterator[None]:
    """Limit PyTorch and MKL to one processor in the calling thread during the block. On a busy
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

    libraries = ctypes.CDLL(torch._C.__file__)  # with the libraries that it was linked with
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
