"""No secret of a URL survives in what is shown."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlinker.store.redaction import place_of, redacted


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("redis://localhost:6379/0", "redis://localhost:6379/0"),
        ("redis://:secret@host:1/2", "redis://host:1/2"),
        ("rediss://user:se/cr@t@host:1/2?password=x", "rediss://host:1/2"),
        ("s3://bucket/folder", "s3://bucket/folder"),
        ("unix://user:pw@/run/redis.sock?db=1", "unix:///run/redis.sock"),
    ],
)
def test_places(url: str, place: str) -> None:
    assert place_of(url) == place


def test_what_is_not_secret_stays() -> None:
    url = "redis://me:hidden@host:6379/0?db=1"
    text = f"Error 111 connecting to host:6379 as me ({url})"
    assert redacted(text, url) == "Error 111 connecting to host:6379 as me (redis://host:6379/0)"
    assert redacted("hidden", url) == "***"


@given(st.text(st.characters(codec="ascii", exclude_categories=["C", "Z"]), min_size=6))
def test_no_password_is_ever_shown(password: str) -> None:
    for written in (password, quote(password, safe="")):
        for url in (f"redis://user:{written}@host/0", f"redis://host/0?password={written}"):
            for said in (password, written, f"cannot reach {url} now", repr(url)):
                shown = redacted(said, url)
                if written != password:
                    assert password not in shown
                    assert written not in shown
