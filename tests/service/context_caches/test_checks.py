"""What the library takes for context caches is what HTTP can show."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.types.chunks import END_OF_TIME, MAX_TTL, UNCHANGED
from kvlinker.service.context_caches.checks import (
    check_fields,
    check_limit,
    check_tenant,
    expiry_of,
    texts_of,
)

ENDLESS: list[Any] = [math.inf, math.nan, 1e300, MAX_TTL + 1, 0, -1, "1", True]


def test_a_ttl_that_does_not_end_in_time_is_refused(subtests: pytest.Subtests) -> None:
    for ttl in ENDLESS:
        with subtests.test(ttl=ttl):
            with pytest.raises(
                InvalidRequestError, match=r"3,153,600,000.*or give None"
            ) as refused:
                expiry_of(ttl)
            assert refused.value.param == "ttl"


def test_the_longest_ttl_is_taken() -> None:
    assert time.time() < expiry_of(MAX_TTL) < END_OF_TIME


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("expires_at", {"expires_at": math.inf}),
    ("expires_at", {"expires_at": math.nan}),
    ("expires_at", {"expires_at": END_OF_TIME + 1}),
    ("name", {"name": 5}),
    ("name", {"name": ""}),
    ("name", {"name": "x" * 257}),
    ("name", {"name": "\ud800"}),
    ("metadata", {"metadata": 5}),
    ("metadata", {"metadata": [5]}),
    ("metadata", {"metadata": {1: "a"}}),
    ("metadata", {"metadata": {str(n): "" for n in range(17)}}),
    ("metadata.a", {"metadata": {"a": 1}}),
    ("metadata.a", {"metadata": [{}, {"a": "x" * 513}]}),
    ("pinned", {"pinned": "x"}),
    ("pinned", {"pinned": 1}),
]


def test_fields_that_http_refuses_are_refused(subtests: pytest.Subtests) -> None:
    for param, fields in REFUSED:
        with subtests.test(param, fields=fields):
            with pytest.raises(InvalidRequestError, match="must be") as refused:
                check_fields(**fields)
            assert refused.value.param == param


def test_fields_that_http_takes_are_taken() -> None:
    check_fields()
    check_fields(expires_at=UNCHANGED, name=UNCHANGED, metadata=UNCHANGED, pinned=UNCHANGED)
    check_fields(expires_at=None, name=None, metadata=None, pinned=False)
    check_fields(expires_at=END_OF_TIME, name="x" * 256, metadata=[{"a": "b"}, {}], pinned=True)


@pytest.mark.parametrize("tenant", ["", None, 5, "\udcff"])
def test_a_tenant_has_a_name(tenant: Any) -> None:
    with pytest.raises(InvalidRequestError, match="'tenant' is") as refused:
        check_tenant(tenant)
    assert refused.value.param == "tenant"


NO_LIMITS: list[Any] = [0, -1, 2**31, 1.5, "1", None, True]


def test_a_limit_is_a_positive_number(subtests: pytest.Subtests) -> None:
    for limit in NO_LIMITS:
        with subtests.test(limit=limit), pytest.raises(InvalidRequestError, match="'limit' is"):
            check_limit(limit)


@pytest.mark.parametrize(
    ("chunks", "param"),
    [(None, "chunks"), (5, "chunks"), (b"x", "chunks"), ({"a": 1}, "chunks"), ([5], "chunks.0")],
)
def test_chunks_are_texts(chunks: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError, match="a text") as refused:
        texts_of(chunks)
    assert refused.value.param == param
    assert texts_of("a") == ("a",)
    assert texts_of(["a", "b"]) == ["a", "b"]
