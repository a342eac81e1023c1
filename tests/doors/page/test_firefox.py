"""What most people do on the page, in Firefox."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.doors.http.serving import Served
from tests.doors.page.conftest import fresh_page, opening
from tests.doors.page.test_conversation import states
from tests.doors.page.test_documents import NURSE, PEOPLE

if TYPE_CHECKING:
    from playwright.sync_api import Browser

TOM = "Where does Tom Reyes live?"


def test_documents_answers_and_a_conversation_that_lasts(firefox: Browser, reading: Served) -> None:
    with opening(firefox) as opened:
        shown = fresh_page(reading, opened)
        shown.drop(people__md=PEOPLE, nurse__txt=NURSE)
        shown.ask(TOM)
        assert shown.answers == ["Oslo"]
        assert states(shown).count("cached") > 20, "it was linked"
        shown.ask("Where does Ana Petrov live?")
        shown.page.reload()
        shown.wait_until_begun()
        assert shown.answers == ["Oslo", "Lima"]
        assert shown.page.locator("#history .title").all_inner_texts() == [TOM]
        shown.ask("Where does Mira Holt live?")
        assert shown.answers == ["Oslo", "Lima", "Varna"]
        assert shown.page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
