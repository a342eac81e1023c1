"""The sources of answers: marks, the list below, the passage in its document, and in the prompt."""

from __future__ import annotations

from typing import Any

import pytest

from tests.doors.http.serving import Served
from tests.doors.page.conftest import Watched
from tests.doors.page.test_conversation import body_of
from tests.doors.page.test_documents import NURSE, PEOPLE, caches

TOM = "Where does Tom Reyes live?"
ANA = "Where does Ana Petrov live?"

LETTER = "".join(
    f"Paragraph {at} tells of house {at}, and of nothing else.\n\n" for at in range(12)
)


def cite(shown: Watched) -> None:
    with shown.settings():
        shown.page.get_by_label("Ask the model to name its sources").check()


def sources(shown: Watched) -> list[str]:
    return shown.page.locator(".turn").last.locator(".sources li button").all_inner_texts()


def test_marks_and_the_list_open_passages(shown: Watched) -> None:
    shown.drop(people__md=PEOPLE, nurse__txt=NURSE)
    cite(shown)
    shown.answer_with("In Oslo [1], or in Lima [1, 2]; but not [7], nor `[2]`.")
    shown.ask(TOM)
    page = shown.page
    assert page.locator(".answered .mark").all_inner_texts() == ["[1]", "[1]", "[2]"]
    first, second = sources(shown)
    page.locator(".answered .mark").first.click()
    page.locator("#passage-text mark").wait_for()
    assert f"{page.inner_text('#passage-title')} #1" == first
    page.get_by_role("button", name=second, exact=True).click()
    page.get_by_text(second.removesuffix(" #1"), exact=True).and_(
        page.locator("#passage-title")
    ).wait_for()
    passage = {"people.md": "Tom Reyes lives in Oslo", "nurse.txt": "Ana Petrov lives in Lima"}
    assert passage[second.removesuffix(" #1")] in page.inner_text("#passage-text mark")
    page.keyboard.press("Escape")
    assert not page.locator("#passage").is_visible()
    assert page.locator(":focus").inner_text() == second, "focus is where it was"


def test_the_model_is_asked_to_name_numbered_passages(shown: Watched) -> None:
    """Numbers go on through a conversation, for its earlier turns stay in the prompt."""
    shown.drop(people__md=PEOPLE, nurse__txt=NURSE)
    bodies = body_of(shown)
    cite(shown)
    with shown.settings():
        shown.page.fill("#limit", "1")
    shown.ask(TOM)
    shown.ask(ANA)
    first, second = (body["messages"][-1]["content"] for body in bodies)
    assert first[0] == {"type": "text", "text": "[1] people.md\n"}
    assert second[0] == {"type": "text", "text": "[2] nurse.txt\n"}
    for content in (first, second):
        assert content[-1]["text"].endswith("as in [1].")
    assert bodies[1]["messages"][0]["content"] == first


def test_small_models_are_not_asked(shown: Watched) -> None:
    shown.drop(people__md=PEOPLE)
    bodies = body_of(shown)
    shown.ask(TOM)
    assert bodies[0]["messages"][0]["content"][-1]["text"] == f"Question: {TOM}"
    assert sources(shown) == ["people.md #1"]

    def large(route: Any) -> None:
        route.fulfill(json=route.fetch().json() | {"parameters": 1_500_000_000})

    shown.page.route("**/status", large)
    shown.page.get_by_text("names sources").wait_for()


def test_the_attention_to_each_source_is_told(shown: Watched, reading: Served) -> None:
    shown.drop(people__md=PEOPLE, nurse__txt=NURSE)
    bodies = body_of(shown)
    shown.ask(TOM)
    told = shown.page.locator(".attention").all_inner_texts()
    body = {"messages": bodies[0]["messages"], "link": {"attention": True}}
    explanation = reading.post("/v1/link/explain", body).json()
    layers = explanation["attention"]
    mean = [sum(weights) / len(layers) for weights in zip(*layers, strict=True)]
    chunks = [each for each in explanation["segments"] if each["type"] == "chunk"]
    sums = [sum(mean[each["start"] : each["end"]]) for each in chunks]
    shares = [int(text.strip().removesuffix("%")) for text in told]
    assert shares == pytest.approx([100 * each / sum(sums) for each in sums], abs=1.5)
    shown.page.reload()
    shown.wait_until_begun()
    assert shown.page.locator(".attention").all_inner_texts() == told, "it is kept"


def test_a_passage_stands_in_its_documents_text(shown: Watched, reading: Served) -> None:
    shown.page.get_by_text("How they are split").click()
    shown.page.select_option("#split-method", "paragraph")
    shown.page.fill("#split-tokens", "16")
    shown.drop(letter__md=LETTER)
    with shown.settings():
        shown.page.fill("#limit", "1")
    shown.ask("What of house 6?")
    page = shown.page
    page.locator(".sources button").click()
    page.get_by_role("button", name="Earlier text").wait_for()
    page.get_by_role("button", name="Later text").wait_for()
    assert f" of {len(caches(reading))}, " in page.inner_text("#passage-place")
    marked = str(page.locator("#passage-text mark").text_content())
    around = str(page.locator("#passage-text").text_content())
    before, _, behind = around.partition(marked)
    assert LETTER.index(before.removeprefix("Earlier text")) < LETTER.index(marked)
    for name in ("Earlier text", "Later text"):
        while (button := page.get_by_role("button", name=name)).count():
            told = str(page.locator("#passage-text").text_content())
            button.click()
            page.wait_for_function(
                "length => document.getElementById('passage-text').textContent.length > length"
                " && document.querySelectorAll('#passage-text button').length <= 2",
                arg=len(told),
            )
    assert page.locator("#passage-text").text_content() == LETTER
    assert behind


def test_the_prompt_names_documents_and_opens_them(shown: Watched) -> None:
    shown.drop(people__md=PEOPLE, nurse__txt=NURSE)
    shown.ask(TOM)
    page = shown.page
    names = page.locator("#tokens .document-name")
    assert sorted(names.all_inner_texts()) == ["nurse.txt", "people.md"]
    page.locator("#tokens .document-name", has_text="nurse.txt").click()
    page.locator("#passage-text mark", has_text="Ana Petrov").wait_for()
    assert page.locator("#tokens span[title='nurse.txt']").count() > 5


def test_a_source_that_was_deleted_is_told_to_be_gone(shown: Watched, reading: Served) -> None:
    shown.expected = ("404",)
    shown.drop(people__md=PEOPLE)
    shown.ask(TOM)
    (only,) = caches(reading)
    reading.http.delete(f"/v1/context_caches/{only['id']}")
    shown.page.locator(".sources button").click()
    shown.page.get_by_text("This passage is not there any more: “people.md” was deleted").wait_for()
    shown.page.get_by_role("button", name="Close the passage").click()
    assert shown.answers == ["Oslo"]
