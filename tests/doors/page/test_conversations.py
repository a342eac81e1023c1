"""Conversations that last: kept by the browser, renamed, exported, changed, and gone on with when a
document is gone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.doors.http.serving import Served
from tests.doors.page.conftest import Watched, fresh_page
from tests.doors.page.test_conversation import body_of
from tests.doors.page.test_documents import NURSE, PEOPLE, caches

TOM = "Where does Tom Reyes live?"
ANA = "Where does Ana Petrov live?"


@pytest.fixture
def talked(shown: Watched) -> Watched:
    """A conversation of two turns."""
    shown.drop(people__md=PEOPLE, nurse__txt=NURSE)
    shown.ask(TOM)
    shown.ask(ANA)
    return shown


def history(watched: Watched) -> list[str]:
    return watched.page.locator("#history .title").all_inner_texts()


def menu(watched: Watched, item: str) -> None:
    watched.page.get_by_text("Export", exact=True).click()
    watched.page.locator("#conversation-menu").get_by_role("button", name=item).click()


def in_list(watched: Watched, action: str, title: str) -> None:
    """Press a button in the list of conversations."""
    watched.page.locator("#history").get_by_role("button", name=f"{action} {title}").click()


def another_tab(watched: Watched) -> Watched:
    """The same address in another tab of the same browser."""
    other = Watched(watched.context.new_page(), watched.context, watched.url)
    other.load(watched.page.url)
    return other


def test_a_reload_keeps_the_conversation(talked: Watched) -> None:
    bodies = body_of(talked)
    talked.page.reload()
    talked.wait_until_begun()
    assert talked.answers == ["Oslo", "Lima"]
    assert history(talked) == [TOM]
    talked.ask("Where does Mira Holt live?")
    assert talked.answers == ["Oslo", "Lima", "Varna"]
    assert len(bodies[0]["messages"]) == 5, "it goes on from there"
    stored = talked.page.evaluate("[localStorage.length, document.cookie]")
    assert stored == [0, ""]


def test_back_leads_to_the_conversation_before(talked: Watched) -> None:
    talked.page.get_by_role("button", name="New").click()
    talked.page.locator(".turn").first.wait_for(state="detached")
    talked.ask("Where does Mira Holt live?")
    assert sorted(history(talked)) == sorted([TOM, "Where does Mira Holt live?"])
    talked.page.go_back()
    talked.page.locator(".turn").first.wait_for(state="detached")
    talked.page.go_back()
    talked.page.locator(".turn").nth(1).wait_for()
    assert talked.answers == ["Oslo", "Lima"]
    talked.page.locator("#history .title", has_text="Mira").click()
    talked.page.locator(".answered", has_text="Varna").wait_for()
    assert talked.answers == ["Varna"]


def test_other_tabs_follow(talked: Watched) -> None:
    other = another_tab(talked)
    assert other.answers == ["Oslo", "Lima"]
    other.ask("Where does Mira Holt live?")
    talked.page.locator(".turn").nth(2).wait_for()
    assert talked.answers == ["Oslo", "Lima", "Varna"]


def test_a_server_that_starts_anew_keeps_the_conversation(
    reading: Served, opened: Callable[..., Watched]
) -> None:
    from kvlinker.doors.http.app import create_app
    from tests.doors.http.serving import listening

    settings = reading.llm.settings
    with listening(create_app(reading.llm, settings), settings, closes=False) as url:
        watched = opened(url)
        watched.expected = ("net::ERR",)
        watched.ask("Where does anybody live?")
        answers = watched.answers
    watched.page.locator("#notice", has_text="does not answer").wait_for()
    port = urlsplit(url).port or 0
    again = create_app(reading.llm, settings)
    with listening(again, settings, closes=False, port=port):
        watched.page.reload()
        watched.wait_until_begun()
        assert watched.answers == answers
        watched.ask("And where does nobody live?")


def test_settings_come_back_with_the_conversation(shown: Watched) -> None:
    bodies = body_of(shown)
    with shown.settings():
        shown.page.fill("#system", "Answer in one word.")
        shown.page.fill("#temperature", "0.5")
        shown.page.fill("#answer-tokens", "7")
        shown.page.select_option("#policy", "legolink")
        shown.page.fill("#parameters [name=tokens]", "3")
    shown.ask("Hello?")
    assert bodies[0]["messages"][0] == {"role": "system", "content": "Answer in one word."}
    assert (bodies[0]["temperature"], bodies[0]["max_tokens"]) == (0.5, 7)
    shown.page.reload()
    shown.page.locator("body[data-ready]").wait_for()
    told = shown.page.inner_text("#settings-summary")
    assert told == (
        "legolink-3 · temperature 0.5 · up to 7 tokens · finds up to 4 chunks · a system prompt"
    )
    shown.ask("Hello again?")
    assert bodies[1]["link"]["policy"] == "legolink-3"
    assert bodies[1]["messages"][0] == bodies[0]["messages"][0]


def test_a_conversation_is_renamed(talked: Watched) -> None:
    in_list(talked, "Rename", TOM)
    talked.page.locator("#question-input").fill("People")
    talked.page.keyboard.press("Enter")
    talked.page.locator("#history .title", has_text="People").wait_for()
    talked.page.reload()
    talked.wait_until_begun()
    assert history(talked) == ["People"]
    assert talked.page.inner_text("#conversation-title") == "People"


def test_a_conversation_is_deleted_once_that_is_confirmed(talked: Watched) -> None:
    in_list(talked, "Delete", TOM)
    talked.page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    assert history(talked) == [TOM]
    in_list(talked, "Delete", TOM)
    talked.page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    talked.page.locator(".turn").first.wait_for(state="detached")
    talked.page.reload()
    talked.wait_until_begun()
    assert history(talked) == []
    assert talked.answers == []


def test_conversations_are_searched_by_all_that_they_say(talked: Watched) -> None:
    page = talked.page
    for question in ("Where does Mira Holt live?", "One?", "Two?", "Three?"):
        page.get_by_role("button", name="New").click()
        page.locator(".turn").first.wait_for(state="detached")
        talked.ask(question)
    page.get_by_label("Search conversations").fill("LIMA")
    page.locator("#history .title").nth(1).wait_for(state="detached")
    assert history(talked) == [TOM], "by an answer"
    page.get_by_label("Search conversations").fill("nothing of this")
    page.get_by_text("No conversation has these words.").wait_for()


def test_another_conversation_is_deleted_from_the_list(talked: Watched) -> None:
    page = talked.page
    page.get_by_role("button", name="New").click()
    page.locator(".turn").first.wait_for(state="detached")
    talked.ask("One?")
    in_list(talked, "Delete", TOM)
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    page.locator("#history .title").nth(1).wait_for(state="detached")
    assert history(talked) == ["One?"]
    assert len(talked.answers) == 1, "the one that is shown stays"


def test_the_last_conversation_is_open_again(talked: Watched) -> None:
    talked.load(f"{talked.url}/")
    assert talked.answers == ["Oslo", "Lima"]
    assert "#c=" in talked.page.url


def exported(watched: Watched, item: str) -> tuple[str, str]:
    """The name and the text of an exported file."""
    with watched.page.expect_download() as download:
        menu(watched, item)
    return download.value.suggested_filename, Path(download.value.path()).read_text()


def test_it_is_exported_as_markdown(talked: Watched) -> None:
    name, text = exported(talked, "As Markdown")
    assert name == "Where does Tom Reyes live.md"
    assert text.startswith(f"# {TOM}\n\n## {TOM}\n\n*About ")
    assert "people.md #1" in text
    assert text.endswith(f"## {ANA}\n\nLima\n")


def test_the_request_is_exported(talked: Watched, reading: Served) -> None:
    name, text = exported(talked, "The request as JSON")
    assert name == "Where does Tom Reyes live.json"
    answer = reading.http.post(
        "/v1/chat/completions", content=text, headers={"Content-Type": "application/json"}
    )
    assert answer.json()["choices"][0]["message"]["content"] == "Lima"


def test_an_answer_is_generated_anew(talked: Watched) -> None:
    bodies = body_of(talked)
    assert talked.page.get_by_role("button", name="Regenerate").count() == 1, "of the last one"
    with talked.settings():
        talked.page.select_option("#policy", "full")
    talked.page.get_by_role("button", name="Regenerate").click()
    talked.page.get_by_text("Of “Where does Ana Petrov live?”, under full").wait_for()
    assert talked.answers == ["Oslo", "Lima"]
    assert [len(body["messages"]) for body in bodies] == [3]


def test_a_question_is_changed_and_what_came_behind_it_goes(talked: Watched) -> None:
    talked.page.get_by_role("button", name="Edit").first.click()
    field = talked.page.get_by_label("The question, changed")
    assert field.input_value() == TOM
    field.fill("Where does Mira Holt live?")
    field.press("Enter")
    talked.page.get_by_text("Of “Where does Mira Holt live?”").wait_for()
    assert talked.answers == ["Varna"]
    talked.page.get_by_role("button", name="Edit").click()
    talked.page.get_by_label("The question, changed").press("Escape")
    assert talked.page.get_by_label("The question, changed").count() == 0


def test_an_answer_is_copied(talked: Watched) -> None:
    talked.context.grant_permissions(["clipboard-read", "clipboard-write"])
    button = talked.page.locator(".turn").first.get_by_role("button", name="Copy")
    button.click()
    talked.page.locator(".turn").first.get_by_role("button", name="Copied").wait_for()
    assert talked.page.evaluate("navigator.clipboard.readText()") == "Oslo"


def code_of(watched: Watched, language: str) -> str:
    watched.page.get_by_role("button", name="As code").last.click()
    watched.page.get_by_role("tab", name=language).click()
    code = watched.page.inner_text("#code-text")
    watched.page.get_by_role("button", name="Close").click()
    return code


@pytest.mark.parametrize("language", ["openai", "curl", "kvlinker"])
def test_the_request_is_shown_as_code_that_runs(talked: Watched, language: str) -> None:
    if language == "curl" and not shutil.which("curl"):
        pytest.skip("curl is not installed")
    code = code_of(talked, language)
    program = ["bash", "-c"] if language == "curl" else [sys.executable, "-c"]
    ran = subprocess.run([*program, code], capture_output=True, text=True, timeout=300)
    assert "Lima" in ran.stdout, ran.stderr


def test_code_does_not_show_the_key(guarded: Served, opened: Callable[..., Watched]) -> None:
    watched = opened(guarded.url)
    watched.expected = ("401",)
    watched.page.get_by_label("API key").fill("key-gamma")
    watched.page.get_by_label("API key").press("Enter")
    watched.page.get_by_role("button", name="Forget the key").wait_for()
    watched.page.locator("#policy option").nth(2).wait_for(state="attached")
    watched.ask("Hello?")
    for language in ("openai", "curl", "kvlinker"):
        code = code_of(watched, language)
        assert "key-gamma" not in code
        assert "KVLINKER_API_KEY" in code
    program = [sys.executable, "-c", code]
    own = os.environ | {"KVLINKER_API_KEY": "key-gamma"}
    ran = subprocess.run(program, env=own, capture_output=True, text=True, timeout=300)
    assert ran.stdout.strip() == watched.answers[0].strip(), ran.stderr


def go_on(watched: Watched, question: str) -> None:
    """Ask, be told that something is gone, and go on without it."""
    watched.page.fill("#question", question)
    watched.page.press("#question", "Enter")
    watched.page.locator("#failure .wrong").wait_for()


def test_a_conversation_goes_on_without_a_document_that_is_gone(
    talked: Watched, reading: Served
) -> None:
    talked.expected = ("404",)
    bodies = body_of(talked)
    (gone,) = [
        cache["id"] for cache in caches(reading) if cache["metadata"]["source"] == "nurse.txt"
    ]
    reading.http.delete(f"/v1/context_caches/{gone}")
    go_on(talked, "Where does Mira Holt live?")
    assert talked.page.locator("#failure .wrong").inner_text() == (
        "“nurse.txt” cannot be used any more: deleted, or belonging to another key."
    )
    assert talked.answers == ["Oslo", "Lima"]
    assert talked.page.input_value("#question") == "Where does Mira Holt live?"
    talked.page.get_by_role("button", name="Go on without it").click()
    talked.page.get_by_text("Of “Where does Mira Holt live?”").wait_for()
    assert talked.answers == ["Oslo", "Lima", "Varna"]
    sent = str(bodies[-1]["messages"])
    assert gone not in sent
    assert "nurse.txt #1 (left out)" in talked.page.inner_text("#turns")
    talked.page.reload()
    talked.wait_until_begun()
    talked.ask("Where does Mira Holt live now?")


def test_a_document_that_is_deleted_here_is_named_too(talked: Watched) -> None:
    talked.expected = ("404",)
    talked.page.get_by_label("Select all that are shown").check()
    talked.page.locator("#delete-selected").click()
    talked.page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    talked.page.get_by_text("Nothing is cached yet.").wait_for()
    go_on(talked, "Where does Mira Holt live?")
    told = talked.page.locator("#failure .wrong").inner_text()
    assert "“people.md”" in told
    assert "“nurse.txt”" in told
    talked.page.get_by_role("button", name="Go on without them").click()
    talked.page.locator(".turn .compare").nth(2).wait_for()


def test_documents_of_another_key_are_named(
    reading: Served, guarded: Served, opened: Callable[..., Watched]
) -> None:
    watched = opened(guarded.url)
    watched.expected = ("401", "404")
    page = watched.page

    def use(key: str) -> None:
        page.get_by_label("API key").fill(key)
        page.get_by_label("API key").press("Enter")
        page.get_by_role("button", name="Forget the key").wait_for()

    use("key-delta")
    watched.drop(people__md=PEOPLE)
    watched.ask(TOM)
    page.get_by_role("button", name="Forget the key").click()
    use("key-epsilon")
    go_on(watched, "Where does Mira Holt live?")
    assert "“people.md” cannot be used any more" in page.inner_text("#failure")


WITHOUT = {
    "refused": (
        "IDBFactory.prototype.open = () => {"
        " const request = {}; setTimeout(() => request.onerror()); return request }"
    ),
    "missing": "Object.defineProperty(window, 'indexedDB', { value: undefined })",
}


@pytest.mark.parametrize("how", WITHOUT)
def test_a_browser_that_keeps_nothing_says_so(
    reading: Served, opened: Callable[..., Watched], how: str
) -> None:
    watched = fresh_page(reading, opened)
    watched.page.add_init_script(WITHOUT[how])
    watched.page.reload()
    watched.wait_until_begun()
    watched.ask("Hello?")
    watched.page.get_by_text("This browser keeps nothing for this page").first.wait_for()
