"""What axe-core finds of the page, in every state that a reader sees: nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.doors.http.serving import Served
from tests.doors.page.conftest import Watched, fresh_page
from tests.doors.page.test_answers import TEXT
from tests.doors.page.test_documents import NURSE, PEOPLE
from tests.doors.page.test_page import PHONE

SCREENS: dict[str, dict[str, Any]] = {
    "light": {"color_scheme": "light"},
    "dark": {"color_scheme": "dark"},
    "phone": {"viewport": PHONE, "has_touch": True, "is_mobile": True},
}


def check(watched: Watched, state: str) -> None:
    """Assert that axe-core, with all of its rules, has nothing to complain of."""
    sync_playwright = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed"
    )
    found = sync_playwright.Axe().run(watched.page).response["violations"]
    told = [(each["id"], [node["html"] for node in each["nodes"]]) for each in found]
    assert told == [], state


@pytest.mark.parametrize("screen", SCREENS)
def test_axe_finds_nothing(reading: Served, opened: Callable[..., Watched], screen: str) -> None:
    watched = fresh_page(reading, opened, **SCREENS[screen])
    watched.expected = ("400",)
    page = watched.page
    check(watched, "the first screen")
    watched.drop(people__md=PEOPLE, nurse__txt=NURSE, picture__png=b"\0")
    watched.ask("Where does Tom Reyes live?")
    if screen == "phone":
        page.get_by_role("button", name="Conversations and documents").click()
    page.locator("#library summary", has_text="nurse.txt").click()
    page.locator(".chunk .clipped", has_text="Ana Petrov").wait_for()
    page.get_by_label("Select people.md").check()
    page.fill("#query", "pilot")
    page.press("#query", "Enter")
    page.locator("#hits li").first.wait_for()
    check(watched, "documents and an answer")
    page.locator("#question").focus()
    page.locator("#models > summary").click()
    page.locator("#model-facts dd").first.wait_for()
    check(watched, "the menu of models")
    page.keyboard.press("Escape")
    page.locator(".sources button").first.click()
    page.locator("#passage-text mark").wait_for()
    check(watched, "a source")
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Compare with the full computation").click()
    page.locator(".verdict").wait_for()
    page.get_by_role("button", name="Edit").click()
    check(watched, "a comparison, and a question that is changed")
    page.get_by_label("The question, changed").press("Escape")
    page.get_by_text("Export", exact=True).click()
    check(watched, "the menu")
    page.get_by_text("Export", exact=True).click()
    if screen == "phone":
        page.get_by_role("button", name="Conversations and documents").click()
        check(watched, "the lists on a phone")
    page.get_by_role("button", name="Rename").click()
    check(watched, "a question to the reader")
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    if screen == "phone":
        page.get_by_role("button", name="Close", exact=True).click()
    page.get_by_role("button", name="As code").click()
    check(watched, "code")
    page.get_by_role("button", name="Close").click()
    with watched.settings():
        page.select_option("#policy", "cacheblend")
        check(watched, "settings")
    watched.answer_with(TEXT, reason="length")
    watched.ask("Where do people live?")
    page.locator(".turn math").first.wait_for()
    check(watched, "an answer in Markdown, which was cut")
    page.get_by_role("tab", name="Server").click()
    page.get_by_text("All metrics").click()
    page.locator("#metrics pre").filter(has_text="kvlinker").wait_for()
    check(watched, "the server")
    if screen != "phone":
        page.keyboard.press("?")
        check(watched, "shortcuts")


def test_axe_finds_nothing_in_the_routes(reading: Served, opened: Callable[..., Watched]) -> None:
    watched = opened(reading.url)
    watched.page.get_by_role("tab", name="Server").click()
    watched.page.get_by_role("link", name="All routes").click()
    watched.page.get_by_text("/v1/context_caches/search").wait_for()
    watched.page.locator("summary").first.click()
    check(watched, "the routes")
