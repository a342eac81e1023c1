import pytest

from kvlinker.base.errors import InvalidRequestError, OverloadedError, PolicyError
from kvlinker.base.types.sampling import SamplingParams
from kvlinker.engines.contract.contract import (
    GenerationRequest,
    check_room,
    check_supported,
    check_wait,
)
from kvlinker.linking import parse_policy
from tests.linking.test_policies import chunk_prompt


@pytest.mark.parametrize(("queued", "choices"), [(0, 1), (0, 5), (4, 1), (2, 3)])
def test_choices_that_find_room_are_admitted(queued, choices):
    check_room(queued, choices, most=5)


@pytest.mark.parametrize(("queued", "choices"), [(5, 1), (3, 3), (7, 1)])
def test_choices_that_do_not_all_find_room_are_refused_for_now(queued, choices):
    with pytest.raises(
        OverloadedError, match=f"{queued} requests are queued already, and there is room for 5"
    ) as info:
        check_room(queued, choices, most=5)
    assert info.value.retry_after == 1


def test_choices_that_never_find_room_are_refused_for_good():
    with pytest.raises(InvalidRequestError, match="n is 6") as info:
        check_room(0, 6, most=5)
    assert info.value.param == "n"


def test_policies_without_support_are_refused_with_the_reason():
    check_supported(None)
    with pytest.raises(PolicyError, match="not here"):
        check_supported("not here")


def test_each_choice_has_its_own_seed():
    prompt, policy = chunk_prompt(4), parse_policy("naive")
    request = GenerationRequest(prompt, policy, SamplingParams(seed=7, top_k=3), n=3)
    assert [request.sampling_of(choice).seed for choice in range(3)] == [7, 8, 9]
    assert request.sampling_of(2).top_k == 3
    free = GenerationRequest(prompt, policy, n=3)
    assert free.sampling_of(2) is free.sampling


@pytest.mark.parametrize("n", [0, -1])
def test_at_least_one_choice_is_wanted(n):
    with pytest.raises(InvalidRequestError, match=f"n is {n}"):
        GenerationRequest(chunk_prompt(4), parse_policy("naive"), n=n)


@pytest.mark.parametrize(("before", "own"), [(0, 0), (0, 50), (4, 6), (9.9, 0)])
def test_who_is_in_time_or_alone_may_wait(before, own):
    check_wait(before, own, most=10)


@pytest.mark.parametrize(
    ("before", "own", "retry_after"), [(8, 4, 2), (0.1, 10, 1), (30, 1, 21), (5, 60, 5)]
)
def test_who_would_be_late_is_told_when_to_come_back(before, own, retry_after):
    with pytest.raises(OverloadedError, match=f"after {before + own:.1f} seconds") as info:
        check_wait(before, own, most=10)
    assert info.value.retry_after == retry_after
