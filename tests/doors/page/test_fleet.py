"""The page of a router: the same as a server's, with the replicas and where chunks lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import pytest

from tests.doors.http.serving import Served
from tests.doors.page.conftest import Watched, fresh_page
from tests.doors.page.test_documents import NURSE


@pytest.fixture
def router(reading: Served) -> Iterator[str]:
    """A router before the server, and before another one that has ended."""
    from kvlinker_fleet.app import create_router
    from kvlinker_fleet.backends import always
    from tests.doors.http.serving import listening

    settings = reading.llm.settings
    app = create_router(always([reading.url, "http://127.0.0.1:9"]), settings, api_key=None)
    with listening(app, settings) as url:
        yield url


def test_replicas_and_where_chunks_lie_are_shown(
    reading: Served, router: str, opened: Callable[..., Watched]
) -> None:
    fresh_page(reading, opened)
    watched = opened(router)
    page = watched.page
    name = urlsplit(reading.url).netloc
    others = len(reading.get("/v1/residency").json()["chunks"])  # of other tests' keys
    page.get_by_role("tab", name="Server").click()
    rows = page.locator("#replicas tbody tr")
    rows.nth(1).wait_for()
    assert rows.nth(0).locator("td").all_inner_texts()[:2] == [name, "ready"]
    assert rows.nth(1).locator("td").all_inner_texts()[:2] == ["127.0.0.1:9", "starting"]
    watched.drop(nurse__txt=NURSE)
    page.get_by_role("row", name=f"{name} ready 0 0 {others + 1}", exact=True).wait_for()
    page.get_by_role("tab", name="Ask").click()
    page.locator("#library summary").click()
    page.get_by_text(f"in memory of {name}").wait_for()
    watched.ask("Where does Ana Petrov live?")
    assert watched.answers == ["Lima"]


def test_a_server_shows_no_replicas(shown: Watched) -> None:
    shown.page.get_by_role("tab", name="Server").click()
    shown.page.locator("#load dd").first.wait_for()
    assert not shown.page.locator("#replicas").is_visible()
