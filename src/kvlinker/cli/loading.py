"""Shows how far a model is loaded: one line that changes on a terminal, elsewhere a line now and
then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

from rich.console import Console
from rich.markup import escape

from kvlinker.base.loading import Loading

TERMINAL_SECONDS, LINE_SECONDS = 0.5, 4.0
"""The times between two states of the line of a terminal, and between two lines of a file."""


@contextmanager
def shown(
    loading: Loading, console: Console, log: Callable[[str], None] | None = None
) -> Iterator[None]:
    """Show ``loading`` on ``console`` while the block loads the model; where ``log`` takes lines,
    there instead."""
    if log is not None or not console.is_terminal:
        say = log or (lambda line: console.print(line, markup=False, soft_wrap=True))
        with _every(LINE_SECONDS, lambda: say(str(loading))):
            yield
        return
    with (
        console.status(escape(str(loading))) as status,
        _every(TERMINAL_SECONDS, lambda: status.update(escape(str(loading)))),
    ):
        yield


@contextmanager
def _every(seconds: float, act: Callable[[], None]) -> Iterator[None]:
    """Call ``act`` every ``seconds``, in a thread of its own, until the block ends."""
    ended = Event()

    def repeat() -> None:
        while not ended.wait(seconds):
            act()

    thread = Thread(target=repeat, name="kvlinker-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
