"""Calls reach an event loop in order, whatever thread they come from, with few wake-ups."""

import asyncio
import gc
import threading
import weakref

from kvlinker.engines.contract.output import LoopInbox, inbox_of


class CountingLoop(asyncio.SelectorEventLoop):
    """Counts how often other threads wake it."""

    woken = 0

    def call_soon_threadsafe(self, *args, **options):  # type: ignore[override]  # any arguments
        self.woken += 1
        return super().call_soon_threadsafe(*args, **options)


def run_in(loop, coroutine):
    try:
        return loop.run_until_complete(coroutine)
    finally:
        loop.close()


def test_many_calls_take_one_wake_up_and_keep_their_order():
    loop = CountingLoop()
    taken: list[int] = []

    async def wait():
        inbox = inbox_of(loop)
        assert inbox_of(loop) is inbox
        for number in range(50):
            inbox.put(taken.append, number)
        assert loop.woken == 1
        await asyncio.sleep(0.01)
        inbox.put(taken.append, 50)
        await asyncio.sleep(0.01)

    run_in(loop, wait())
    assert taken == list(range(51))


def test_threads_lose_no_call():
    loop = CountingLoop()
    taken: list[tuple[int, int]] = []

    async def wait():
        inbox = inbox_of(loop)

        def put(thread):
            for number in range(2000):
                inbox.put(taken.append, (thread, number))

        threads = [threading.Thread(target=put, args=(index,)) for index in range(3)]
        for thread in threads:
            thread.start()
        while len(taken) < 6000:
            await asyncio.sleep(0)

    run_in(loop, asyncio.wait_for(wait(), 60))
    for thread in range(3):
        assert [number for index, number in taken if index == thread] == list(range(2000))


def test_a_call_that_fails_concerns_no_other(caplog):
    loop = CountingLoop()
    taken: list[int] = []

    async def wait():
        inbox = inbox_of(loop)
        inbox.put([].pop)
        inbox.put(taken.append, 1)
        await asyncio.sleep(0.01)

    run_in(loop, wait())
    assert taken == [1]
    assert "failed" in caplog.text


def test_a_loop_that_was_closed_is_told_nothing_and_goes():
    loop = asyncio.new_event_loop()
    inbox = inbox_of(loop)
    loop.close()
    inbox.put(print, "never")
    inbox.put(print, "never")
    gone = weakref.ref(loop)
    del loop
    gc.collect()
    assert gone() is None
    LoopInbox.put(inbox, print, "never")


def test_a_loop_that_closes_before_it_looks_is_let_go_with_its_calls():
    loop = CountingLoop()
    queue: asyncio.Queue[int] = asyncio.Queue()
    inbox = inbox_of(loop)
    inbox.put(loop.stop)  # a call that holds the loop
    loop.close()
    for number in range(1000):
        inbox.put(queue.put_nowait, number)
    assert not inbox._calls
    gone = weakref.ref(loop)
    del loop
    gc.collect()
    assert gone() is None


def test_a_loop_with_calls_that_nobody_empties_goes_with_those_who_put():
    loop = CountingLoop()
    inbox = inbox_of(loop)
    inbox.put(loop.stop)
    loop.close()
    gone = weakref.ref(loop)
    del loop, inbox
    gc.collect()
    assert gone() is None
