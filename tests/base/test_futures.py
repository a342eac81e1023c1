import gc
import weakref
from concurrent.futures import CancelledError, Future
from typing import Any

import pytest

from kvlinker.base.futures import completed, fall_back, follow_up, gather


def test_results_come_in_order_whatever_finishes_first():
    futures: list[Future[int]] = [Future(), Future(), Future()]
    joined = gather(futures, list)
    for index in (2, 0, 1):
        assert not joined.done()
        futures[index].set_result(index)
    assert joined.result() == [0, 1, 2]


def test_nothing_to_wait_for_is_done():
    assert gather([], len).result() == 0


def test_the_first_failure_in_order_is_the_outcome():
    futures: list[Future[int]] = [Future(), Future()]
    joined = gather(futures, list)
    futures[1].set_exception(ValueError("second"))
    futures[0].set_exception(KeyError("first"))
    with pytest.raises(KeyError):
        joined.result()


def test_a_failing_finish_is_the_outcome():
    future: Future[int] = Future()
    joined = gather([future], lambda _: 1 / 0)
    future.set_result(1)
    with pytest.raises(ZeroDivisionError):
        joined.result()


def test_what_was_found_is_not_sought_elsewhere():
    assert fall_back(completed(1), lambda _: pytest.fail("not needed")).result() == 1


def test_what_was_not_found_is_what_comes_from_elsewhere():
    found: Future[int | None] = Future()
    other: Future[int] = Future()
    joined = fall_back(found, lambda _: other)
    found.set_result(None)
    assert not joined.done()
    other.set_result(2)
    assert joined.result() == 2


def test_what_was_found_but_is_not_accepted_is_shown_to_who_seeks_elsewhere():
    refused = fall_back(
        completed(1), lambda value: completed(-(value or 0)), accepts=lambda value: value > 1
    )
    assert refused.result() == -1
    accepted = fall_back(
        completed(2), lambda _: pytest.fail("not needed"), accepts=lambda value: value > 1
    )
    assert accepted.result() == 2


@pytest.mark.parametrize("failure", [CancelledError(), KeyboardInterrupt()])
@pytest.mark.parametrize("where", ["found", "accepting", "asking", "other"])
@pytest.mark.parametrize("early", [True, False])
def test_a_future_is_returned_and_completes_whatever_fails(
    failure: BaseException, where: str, early: bool
) -> None:
    """A second future that is cancelled, too, and a first one that is done before."""
    found: Future[int | None] = Future()
    other: Future[int] = Future()

    def fail(future: Future[Any]) -> None:
        if isinstance(failure, CancelledError):
            assert future.cancel()
        else:
            future.set_exception(failure)

    def accepts(_: int) -> bool:
        if where == "accepting":
            raise failure
        return False

    def otherwise(_: int | None) -> Future[int]:
        if where == "asking":
            raise failure
        return other

    def find() -> None:
        if where == "found":
            fail(found)
        else:
            found.set_result(1)

    if early:
        find()
    joined = fall_back(found, otherwise, accepts)
    if not early:
        find()
    if where == "other":
        fail(other)
    assert joined.done()
    with pytest.raises(type(failure)):
        joined.result()


@pytest.mark.parametrize("where", ["found", "asking", "other"])
def test_whatever_fails_is_the_outcome(where):
    found: Future[int | None] = Future()
    other: Future[int] = Future()

    def otherwise(_):
        if where == "asking":
            raise ValueError(where)
        return other

    joined = fall_back(found, otherwise)
    if where == "found":
        found.set_exception(ValueError(where))
    else:
        found.set_result(None)
        other.set_exception(ValueError(where))
    with pytest.raises(ValueError, match=where):
        joined.result()


def test_results_are_not_kept_alive():
    """Chunk KV is large: it must go when its last user goes, not when the cycle collector comes
    by."""

    class Large:
        pass

    gc.disable()
    try:
        future: Future[Large] = Future()
        joined = gather([future], lambda results: len(results))
        large = Large()
        gone = weakref.ref(large)
        future.set_result(large)
        del future, large
        assert joined.result() == 1
        assert gone() is None
    finally:
        gc.enable()


def test_one_future_after_another() -> None:
    first, second = Future[int](), Future[str]()
    asked: list[int] = []

    def go_on(value: int) -> Future[str]:
        asked.append(value)
        return second

    joined = follow_up(first, go_on)
    first.set_result(3)
    assert (asked, joined.done()) == ([3], False)
    second.set_result("done")
    assert joined.result() == "done"


@pytest.mark.parametrize("at", ["first", "between", "second"])
def test_a_failure_on_the_way_is_the_joined_ones(at: str) -> None:
    first, second = Future[int](), Future[int]()

    def go_on(value: int) -> Future[int]:
        if at == "between":
            raise ValueError(at)
        return second

    joined = follow_up(first, go_on)
    if at == "first":
        first.set_exception(ValueError(at))
    else:
        first.set_result(1)
    if at == "second":
        second.set_exception(ValueError(at))
    with pytest.raises(ValueError, match=at):
        joined.result()
