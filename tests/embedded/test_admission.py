import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from kvlinker.embedded.admission import PREFETCHED, Admission
from kvlinker.embedded.commands import CommandQueue
from kvlinker.errors import EngineClosedError, OverloadedError


class Request:
    """Of a ``LinkedRequest``, what admission looks at."""

    explains = lost_before = False

    def __init__(self):
        self.request = self
        self.failures = []
        self.decided = threading.Event()

    def fail(self, error):
        self.failures.append(error)
        self.decided.set()


class Links:
    """Fetches nothing until it is told to."""

    def __init__(self):
        self.asked = {}
        self.begun = threading.Semaphore(0)

    def link(self, request, *, at_hand):
        self.asked[request] = Future()
        self.begun.release()
        return self.asked[request]


class Made:
    """An admission over links that the test controls, and what it handed over."""

    def __init__(self, loaders, max_waiting):
        self.links, self.scheduler, self.commands = Links(), SimpleNamespace(waiting=0), CommandQueue()
        self.admission = Admission(self.links, self.scheduler, self.commands, loaders, max_waiting=max_waiting)
        self.ready = []

    def admit(self):
        request = Request()
        self.admission.admit(request, self.take_over)
        return request

    def take_over(self, request, link):
        self.ready.append((request, link))
        request.decided.set()

    def fetched(self):
        """One that is being fetched, and now is there."""
        request = next(iter(self.links.asked))
        self.links.asked[request].set_result("link")
        assert request.decided.wait(timeout=60)
        return request

    def wait_for_fetching(self, count=1):
        for _ in range(count):
            assert self.links.begun.acquire(timeout=60)

    def close(self):
        self.commands.close()
        self.admission.fail_all(EngineClosedError("The engine was shut down."))


@contextmanager
def admission(max_waiting=1000):
    with ThreadPoolExecutor(2) as loaders:
        made = Made(loaders, max_waiting)
        try:
            yield made
        finally:
            made.close()


def test_what_was_fetched_is_handed_over_and_taken_once():
    with admission() as made:
        request = made.admit()
        made.wait_for_fetching()
        assert made.fetched() is request
        assert made.ready == [(request, "link")]
        assert made.admission.waiting == 1
        assert [made.admission.take(request) for _ in range(2)] == [True, False]
        assert made.admission.waiting == 0
    assert not request.failures


def test_so_many_are_fetched_ahead():
    with admission() as made:
        for _ in range(PREFETCHED + 2):
            made.admit()
        made.wait_for_fetching(PREFETCHED)
        assert not made.links.begun.acquire(timeout=0.05)
        made.scheduler.waiting = 1
        made.fetched()  # it waits in the scheduler's queue instead
        assert not made.links.begun.acquire(timeout=0.05)
        made.scheduler.waiting = 0
        made.admission.proceed()
        made.wait_for_fetching()


def test_a_request_that_was_taken_is_not_fetched():
    with admission() as made:
        requests = [made.admit() for _ in range(PREFETCHED + 1)]
        made.wait_for_fetching(PREFETCHED)
        (last,) = set(requests) - set(made.links.asked)
        assert made.admission.take(last)
        made.fetched()
        after = made.admit()
        made.wait_for_fetching()
        assert after in made.links.asked
        assert last not in made.links.asked


def test_more_than_may_wait_are_refused():
    with admission(max_waiting=3) as made:
        made.scheduler.waiting = 1
        for _ in range(2):
            made.admit()
        with pytest.raises(OverloadedError, match="3 requests"):
            made.admit()


@pytest.mark.parametrize("error", [EngineClosedError("closing"), RuntimeError("a bug")])
def test_what_fails_fails_its_request_only(error, caplog):
    with admission() as made:
        bad, good = made.admit(), made.admit()
        made.wait_for_fetching(2)
        made.links.asked[bad].set_exception(error)
        made.links.asked[good].set_result("link")
        assert bad.decided.wait(timeout=60)
        assert good.decided.wait(timeout=60)
        assert [request for request, _ in made.ready] == [good]
        assert not good.failures
    (failure,) = bad.failures
    assert (failure is error) == isinstance(error, EngineClosedError)
    assert ("a bug" in caplog.text) == isinstance(error, RuntimeError)


def test_who_comes_while_the_engine_closes_is_refused_or_failed():
    admitted, refused = [], []
    begin = threading.Barrier(5)

    def flood(made):
        begin.wait()
        for _ in range(200):
            try:
                admitted.append(made.admit())
            except EngineClosedError:
                refused.append(made)

    with admission() as made:
        threads = [threading.Thread(target=flood, args=(made,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        begin.wait()
        made.close()
        for thread in threads:
            thread.join()
    assert len(admitted) + len(refused) == 800
    assert all(len(request.failures) == 1 for request in admitted)
