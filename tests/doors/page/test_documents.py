"""Documents on the page: dropped, seen, searched, chosen, deleted; and shown as text, whatever they
are called."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.doors.http.serving import Served
from tests.doors.page.conftest import Watched

PEOPLE = (
    "Mira Holt lives in Varna. She works as a baker.\n\nTom Reyes lives in Oslo. He works as a"
    " pilot.\n\n"
)
NURSE = "Ana Petrov lives in Lima. She works as a nurse.\n"


def caches(served: Served) -> list[dict]:
    return served.get("/v1/context_caches?limit=100&order=asc").json()["data"]


def test_dropped_files_become_context_caches(shown: Watched, reading: Served) -> None:
    shown.page.get_by_text("How they are split").click()
    shown.page.select_option("#split-method", "paragraph")
    shown.drop(people__md=PEOPLE, nurse__txt=NURSE)
    assert shown.page.locator("#uploads li").all_inner_texts() == [
        "people.md 2 chunks",
        "nurse.txt 1 chunk",
    ]
    made = caches(reading)
    assert [cache["metadata"]["source"] for cache in made] == [
        "people.md",
        "people.md",
        "nurse.txt",
    ]
    texts = [
        reading.get(f"/v1/context_caches/{cache['id']}/content").json()["text"] for cache in made
    ]
    assert "".join(texts[:2]) == PEOPLE
    for cache, text in zip(made[:2], texts, strict=False):
        assert PEOPLE[int(cache["metadata"]["start"]) : int(cache["metadata"]["end"])] == text
    documents = shown.page.locator("#library summary").all_inner_texts()
    assert documents[0].startswith("nurse.txt 1 chunk, ")
    assert documents[1].startswith("people.md 2 chunks, ")


def test_progress_is_told_by_chunks(shown: Watched) -> None:
    """A document of some thousand tokens is cached in several requests."""
    seen: list[str] = []
    shown.page.expose_function("note", lambda words: seen.append(words))
    shown.page.evaluate(
        """() => new MutationObserver(
          () => note(document.querySelector("#uploads small").textContent)
        ).observe(document.getElementById("uploads"),
          { childList: true, subtree: true, characterData: true })"""
    )
    shown.drop(long__txt=PEOPLE * 120)
    told = [words for words in seen if re.fullmatch(r"\d+ of \d+ chunks", words)]
    assert len(dict.fromkeys(told)) >= 2


def test_a_file_that_is_dropped_again_takes_its_own_place(shown: Watched, reading: Served) -> None:
    shown.drop(people__md=PEOPLE)
    before = caches(reading)
    shown.drop(people__md=PEOPLE.replace("Oslo", "Rome"))
    after = caches(reading)
    assert len(before) == len(after) == 1
    assert before[0]["id"] != after[0]["id"]
    assert "Rome" in reading.get(f"/v1/context_caches/{after[0]['id']}/content").json()["text"]


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"\xff\xfe\x00PK", "is no UTF-8 text"), (b" \n\n", "has no text")],
    ids=["bytes", "blank"],
)
def test_what_is_no_text_is_refused_by_name(
    shown: Watched, reading: Served, content: bytes, words: str
) -> None:
    shown.drop(picture__png=content, nurse__txt=NURSE)
    refused, cached = shown.page.locator("#uploads li").all_inner_texts()
    assert refused.startswith(f"picture.png {words}")
    assert cached == "nurse.txt 1 chunk"
    assert len(caches(reading)) == 1


def test_files_can_be_chosen_without_a_mouse(shown: Watched, reading: Served) -> None:
    shown.page.set_input_files(
        "#files", [{"name": "nurse.txt", "mimeType": "text/plain", "buffer": NURSE.encode()}]
    )
    shown.page.get_by_text("nurse.txt 1 chunk").first.wait_for()
    assert len(caches(reading)) == 1


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a file, and one in a folder of its own."""
    made = tmp_path / "papers"
    (made / "inner").mkdir(parents=True)
    (made / "people.md").write_text(PEOPLE)
    (made / "inner" / "nurse.txt").write_text(NURSE)
    return made


def test_a_folder_is_dropped_with_all_that_is_in_it(
    shown: Watched, reading: Served, folder: Path
) -> None:
    """The browser itself drops it: a script cannot make folders."""
    box = shown.page.locator("#drop").bounding_box()
    assert box is not None
    devtools = shown.context.new_cdp_session(shown.page)
    data = {"items": [], "files": [str(folder)], "dragOperationsMask": 1}
    for kind in ("dragEnter", "dragOver", "drop"):
        devtools.send(
            "Input.dispatchDragEvent",
            {"type": kind, "x": box["x"] + 9, "y": box["y"] + 9, "data": data},
        )
    shown.page.locator("#library details").nth(1).wait_for()
    assert {cache["metadata"]["source"] for cache in caches(reading)} == {
        "papers/people.md",
        "papers/inner/nurse.txt",
    }


def test_a_folder_can_be_chosen(shown: Watched, reading: Served, folder: Path) -> None:
    shown.page.set_input_files("#folder", folder)
    shown.page.locator("#library details").nth(1).wait_for()
    assert {cache["metadata"]["source"] for cache in caches(reading)} == {
        "papers/people.md",
        "papers/inner/nurse.txt",
    }


def test_search_finds_chunks_and_puts_them_into_the_next_question(shown: Watched) -> None:
    shown.drop(people__md=PEOPLE, nurse__txt=NURSE)
    shown.page.fill("#query", "nurses")
    shown.page.press("#query", "Enter")
    hits = shown.page.locator("#hits li")
    hits.first.wait_for()
    (found,) = hits.all_inner_texts()
    assert found.split() == ["nurse.txt", "#1,", "15", "tokens", *NURSE.split()]
    hits.get_by_role("checkbox").check()
    shown.page.get_by_role("button", name="Leave out nurse.txt #1").wait_for()
    shown.ask("Where does Ana Petrov live?")
    assert shown.answers == ["Lima"]
    assert "about nurse.txt #1" in shown.page.inner_text("#turns")
    assert shown.page.locator("#chosen li").count() == 0
    shown.page.fill("#query", "zebra")
    shown.page.press("#query", "Enter")
    shown.page.get_by_text("Nothing matches.").wait_for()


def test_documents_can_be_read_chosen_and_deleted(shown: Watched, reading: Served) -> None:
    shown.drop(people__md=PEOPLE, nurse__txt=NURSE)
    document = shown.page.locator("#library details", has_text="people.md")
    document.locator("summary").click()
    document.get_by_text("Mira Holt lives in Varna.").wait_for()
    document.get_by_role("button", name="Use all").click()
    assert document.get_by_role("checkbox").is_checked()
    shown.page.get_by_role("button", name="Leave out people.md #1").click()
    assert not document.get_by_role("checkbox").is_checked()
    document.get_by_role("button", name="Delete").click()
    document.wait_for(state="detached")
    assert [cache["metadata"]["source"] for cache in caches(reading)] == ["nurse.txt"]


def test_names_and_texts_are_shown_as_text(shown: Watched) -> None:
    """What would run in markup runs nowhere: in names, texts, hits, choices, answers and
    prompts."""
    trap = "<img src=x onerror=\"document.title='taken'\">"
    shown.drop_all({trap: f"{trap} <script>document.title = 'taken'</script> Ana lives in Lima.\n"})
    document = shown.page.locator("#library details")
    document.locator("summary").click()
    document.get_by_role("button", name="Use all").click()
    shown.page.fill("#query", "Lima")
    shown.page.press("#query", "Enter")
    shown.page.locator("#hits li").wait_for()
    shown.ask(f"{trap} Where does Ana live?")
    shown.page.locator("#tokens span").first.click()
    for place in ("#uploads", "#library", "#hits", "#turns", "#prompt-of"):
        assert trap in shown.page.inner_text(place), place
    assert trap in "".join(shown.page.locator("#tokens span").all_text_contents())
    assert shown.page.locator("img, main script").count() == 0
    assert shown.page.title() == "kvlinker"
    assert not any(url.endswith("/x") for url in shown.requests)
