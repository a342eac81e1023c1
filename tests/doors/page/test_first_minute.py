"""What a reader sees first: what this is, documents to try, questions about them, and one hint."""

from __future__ import annotations

from collections.abc import Callable

from tests.doors.http.serving import Served
from tests.doors.page.conftest import Watched, fresh_page
from tests.doors.page.test_documents import NURSE, caches

TOM = "Where does Tom Reyes live?"


def test_a_question_that_is_offered_caches_the_documents_and_is_answered(
    shown: Watched, reading: Served
) -> None:
    page = shown.page
    assert page.locator("#welcome > p").inner_text().count(". ") == 1, "two sentences"
    assert page.locator("#example-documents li").count() == 3
    page.get_by_role("button", name=TOM).click()
    page.locator(".turn .compare").wait_for()
    assert shown.answers == ["Oslo"]
    assert len(caches(reading)) == 3
    assert not page.locator("#welcome").is_visible()


def test_documents_are_added_by_one_click_and_asked_about(shown: Watched, reading: Served) -> None:
    page = shown.page
    with shown.uploading():
        page.get_by_role("button", name="Add the three documents").click()
    assert {cache["metadata"]["source"] for cache in caches(reading)} == {
        "bakery.md",
        "harbour.md",
        "clinic.md",
    }
    assert not page.locator("#examples").is_visible()
    page.get_by_role("button", name="What does Ana Petrov work as?").click()
    page.locator(".turn .compare").wait_for()
    assert shown.answers == ["nurse"]


def test_with_documents_of_ones_own_no_examples_are_offered(shown: Watched) -> None:
    shown.drop(nurse__txt=NURSE)
    assert shown.page.locator("#welcome > p").is_visible()
    assert not shown.page.locator("#examples").is_visible()
    assert not shown.page.locator("#example-questions").is_visible()


def test_the_colours_are_explained_once(reading: Served, opened: Callable[..., Watched]) -> None:
    watched = fresh_page(reading, opened)
    page = watched.page
    assert not page.locator("#hint").is_visible()
    watched.ask("Hello?")
    page.get_by_text("Each colour says what became of a token").wait_for()
    page.get_by_role("button", name="Understood").click()
    assert not page.locator("#hint").is_visible()
    watched.ask("Hello again?")
    assert not page.locator("#hint").is_visible()
    page.get_by_role("button", name="New").click()
    page.locator(".turn").first.wait_for(state="detached")
    watched.ask("And in another conversation?")
    assert not page.locator("#hint").is_visible()
