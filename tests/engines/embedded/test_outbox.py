"""What callers are told waits for the owner's flush, and keeps its order."""

from __future__ import annotations

import threading
from functools import partial

from kvlinker.engines.embedded.outbox import Outbox


def in_thread(call) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def test_the_owners_calls_wait_and_come_in_order() -> None:
    box, told = Outbox(), list[int]()
    box.put(partial(told.append, 0))
    assert told == [0]
    box.own()
    for number in (1, 2):
        box.put(partial(told.append, number))
    assert told == [0]
    box.flush()
    assert told == [0, 1, 2]
    box.put(partial(told.append, 3))
    box.disown()
    box.put(partial(told.append, 4))
    assert told == [0, 1, 2, 3, 4]


def test_another_threads_call_comes_at_once_behind_what_was_put_off() -> None:
    box, told = Outbox(), list[int]()
    box.own()
    box.put(partial(told.append, 1))
    in_thread(lambda: box.put(partial(told.append, 2)))
    assert told == [1, 2]


def test_a_call_may_put_another() -> None:
    box, told = Outbox(), list[int]()
    box.own()

    def first() -> None:
        told.append(1)
        box.put(partial(told.append, 3))

    box.put(first)
    box.put(partial(told.append, 2))
    box.flush()
    assert told == [1, 2, 3]
