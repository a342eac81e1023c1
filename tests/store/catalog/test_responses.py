"""Responses in the catalog: whole conversations, each tenant's alone, within limits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvlinker.base.types.responses import KeptResponse, Turn
from kvlinker.store import Catalog, StoreError
from kvlinker.store.catalog import responses
from kvlinker.store.catalog.encryption import change_key
from kvlinker.store.catalog.responses import ResponseLog
from kvlinker.store.format.encryption import Cipher
from tests.store.catalog.raw import harm

Place = Path | str
DAY = 86400.0


def keep(log: ResponseLog, name: str, *, tenant: str = "anna", at: float = 0, **how: Any) -> None:
    """Keep the response of a name for a day, with two items."""
    output = {f"msg_{name}": f'"{name} says"', f"fc_{name}": f'"{name} calls"'}
    kept = KeptResponse(f"resp_{name}", f'{{"name": "{name}"}}', f'["{name} is asked"]', output)
    log.add(kept, tenant, now=at, ttl=DAY, **how)


def turn(name: str) -> Turn:
    return Turn(f'["{name} is asked"]', [f'"{name} says"', f'"{name} calls"'])


def test_a_response_is_read_as_it_was_kept(place: Place) -> None:
    with closing(Catalog(place)) as catalog:
        keep(catalog.responses, "a")
    with closing(Catalog(place)) as catalog:
        kept = catalog.responses.get("resp_a", "anna", 1)
        assert kept is not None
        assert (kept.id, kept.body, kept.input) == ("resp_a", '{"name": "a"}', '["a is asked"]')
        assert list(kept.output.items()) == [("msg_a", '"a says"'), ("fc_a", '"a calls"')]


def test_a_conversation_has_all_turns_in_order(catalog: Catalog) -> None:
    log = catalog.responses
    keep(log, "a")
    keep(log, "b", previous="resp_a")
    keep(log, "c", previous="resp_b")
    keep(log, "other", previous="resp_a")
    assert log.conversation("resp_c", "anna", 1) == [turn("a"), turn("b"), turn("c")]
    assert log.conversation("resp_other", "anna", 1) == [turn("a"), turn("other")]
    assert log.items(["msg_b", "fc_a", "msg_none"], "anna", 1) == {
        "msg_b": '"b says"',
        "fc_a": '"a calls"',
    }
    assert log.inputs(["resp_b", "resp_none"], "anna", 1) == ['["b is asked"]']


def test_another_tenants_are_absent(catalog: Catalog) -> None:
    log = catalog.responses
    keep(log, "a")
    keep(log, "b", tenant="bert", previous="resp_a")
    assert log.get("resp_a", "bert", 1) is None
    assert log.conversation("resp_a", "bert", 1) is None
    assert log.conversation("resp_b", "bert", 1) is None, "what it goes on from is another's"
    assert log.items(["msg_a"], "bert", 1) == {}
    assert log.inputs(["resp_a"], "bert", 1) == []
    assert not log.delete("resp_a", "bert", 1)
    assert log.get("resp_a", "anna", 1)


def test_nothing_goes_on_from_what_was_deleted(catalog: Catalog) -> None:
    log = catalog.responses
    keep(log, "a")
    keep(log, "b", previous="resp_a")
    assert log.delete("resp_a", "anna", 1)
    assert not log.delete("resp_a", "anna", 1)
    assert log.conversation("resp_b", "anna", 1) is None
    assert log.items(["msg_a"], "anna", 1) == {}
    assert log.get("resp_b", "anna", 1), "it can still be read"
    keep(log, "c", previous="resp_a")  # deleted while it was answered
    assert log.conversation("resp_c", "anna", 1) is None
    assert log.delete_all() == 2


def test_a_use_lets_all_before_it_live_on(catalog: Catalog) -> None:
    log = catalog.responses
    keep(log, "a")
    keep(log, "unused")
    keep(log, "read")
    keep(log, "b", previous="resp_a", at=DAY / 2)
    keep(log, "c", used=["fc_b", "resp_read"], at=DAY - 1)
    assert log.inputs(["resp_read"], "anna", 2 * DAY - 2) == ['["read is asked"]']
    for now in (DAY, 2 * DAY - 2):
        assert log.conversation("resp_b", "anna", now) == [turn("a"), turn("b")]
        assert log.get("resp_unused", "anna", now) is None
    assert log.expire(DAY, limit=10) == 1
    assert log.expire(2 * DAY, limit=2) == 2
    assert log.expire(2 * DAY, limit=2) == 2
    assert log.expire(2 * DAY, limit=2) == 0


def test_those_used_longest_ago_make_room(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = catalog.responses
    monkeypatch.setattr(responses, "MOST_RESPONSES", 3)
    for time, name in enumerate("abc"):
        keep(log, name, at=time)
    keep(log, "d", previous="resp_a", at=4)
    keep(log, "e", tenant="bert")
    assert [name for name in "abcde" if log.get(f"resp_{name}", "anna", 5)] == ["a", "c", "d"]
    monkeypatch.setattr(responses, "MOST_BYTES", 100)
    keep(log, "f", at=5)
    assert [name for name in "acdf" if log.get(f"resp_{name}", "anna", 5)] == ["f"]
    assert log.get("resp_e", "bert", 5)


def test_texts_are_encrypted_where_the_catalog_is(make_place: Callable[[], Place]) -> None:
    place, old, new = make_place(), Cipher(b"1" * 32), Cipher(b"2" * 32)
    with closing(Catalog(place)) as catalog:
        keep(catalog.responses, "a")
    with closing(Catalog(place, old)) as catalog:  # encrypts what is there
        keep(catalog.responses, "b", previous="resp_a")
        blobs = harm(place, "SELECT body FROM responses") + harm(
            place, "SELECT content FROM response_items"
        )
        assert len(blobs) == 6
        assert not any(bytes(blob).startswith(b"x\x9c") for (blob,) in blobs), "zlib's first bytes"
        change_key(catalog._database, old, new)
    with closing(Catalog(place, new)) as catalog:
        assert catalog.responses.conversation("resp_b", "anna", 1) == [turn("a"), turn("b")]


def test_changed_texts_are_found_and_removed(place: Place) -> None:
    with closing(Catalog(place)) as catalog:
        for name in "abc":
            keep(catalog.responses, name)
        harm(place, "UPDATE responses SET body = ? WHERE id = 'resp_a'", b"other")
        harm(place, "UPDATE response_items SET content = ? WHERE id = 'fc_b'", b"other")
        with pytest.raises(StoreError, match=r"responses\.body\..* was changed from outside"):
            catalog.responses.get("resp_a", "anna", 1)
        assert len(catalog.check(repair=True)) == 2
        assert catalog.check() == ()
        assert catalog.responses.get("resp_b", "anna", 1) is None
        assert catalog.responses.get("resp_c", "anna", 1)
