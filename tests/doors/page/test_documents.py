"""Documents on the page: dropped, seen, searched, chosen, deleted; and shown as text, whatever they
are called."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.doors.http.serving import Served
from tests.doors.page.conftest import Watched

PEOPLE = (
    "Mira Holt lives in Varna. She works as a baker.\n\nTom Reyes lives in Oslo. He works as a"
    " pilot.\n\n"
)
NURSE = "Ana Petrov lives in Lima. She works as a nurse.\n"


CONVERTER = """
def extract_text(file):
    return "# Paper\\n\\n" + file.read().decode()
"""
"""In the place of pdfminer's."""

UPLOADS = """async ask => {
  const request = indexedDB.open("kvlinker", 1);
  await new Promise(done => { request.onsuccess = done });
  const store = request.result.transaction("uploads", "readwrite").objectStore("uploads");
  const answer = store[ask]();
  await new Promise(done => { answer.onsuccess = done });
  return answer.result ?? null;
}"""

KEPT_UPLOADS = f"() => ({UPLOADS})('count')"
FORGET_UPLOADS = f"() => ({UPLOADS})('clear')"

FILTER_MILLISECONDS = """() => {
  const filter = document.getElementById("filter");
  const begin = performance.now();
  for (const value of ["n", "no", "not", ""]) {
    filter.value = value;
    filter.dispatchEvent(new Event("input"));
  }
  return (performance.now() - begin) / 4;
}"""


def caches(served: Served) -> list[dict]:
    return served.get("/v1/context_caches?limit=100&order=asc").json()["data"]


def test_dropped_files_become_context_caches(shown: Watched, reading: Served) -> None:
    shown.page.get_by_text("How they are split").click()
    shown.page.select_option("#split-method", "paragraph")
    shown.drop(people__md=PEOPLE, nurse__txt=NURSE)
    assert shown.page.locator("#uploads li").count() == 0, "lines go once they are done"
    assert shown.page.inner_text("#uploaded") == "Cached 2 files: 3 chunks."
    made = caches(reading)
    assert [cache["metadata"]["source"] for cache in made] == [
        "nurse.txt",  # the smallest file comes first
        "people.md",
        "people.md",
    ]
    texts = [
        reading.get(f"/v1/context_caches/{cache['id']}/content").json()["text"] for cache in made
    ]
    assert "".join(texts[1:]) == PEOPLE
    for cache, text in zip(made[1:], texts[1:], strict=True):
        assert PEOPLE[int(cache["metadata"]["start"]) : int(cache["metadata"]["end"])] == text
    documents = shown.page.locator("#library summary").all_inner_texts()
    assert documents[0].startswith("people.md 2 chunks, "), "the newest is first in the list"
    assert documents[1].startswith("nurse.txt 1 chunk, ")


def test_progress_is_told_by_tokens(shown: Watched) -> None:
    """A document of some thousand tokens is cached in several requests."""
    seen: list[str] = []
    shown.page.expose_function("note", lambda words: seen.append(words))
    shown.page.evaluate(
        """() => new MutationObserver(
          () => note(Array.from(document.querySelectorAll("#upload-all small, #uploads small"),
            line => line.textContent).join("; "))
        ).observe(document.getElementById("documents"),
          { childList: true, subtree: true, characterData: true })"""
    )
    shown.drop(long__txt=PEOPLE * 120)
    every = r"0 of 1 file · [\d,]+ of [\d,]+ tokens · [\d,]+ tokens/s · \d+ s left"
    pattern = rf"{every}; [\d,]+ of [\d,]+ tokens"
    told = [words for words in seen if re.fullmatch(pattern, words)]
    assert len(dict.fromkeys(told)) >= 2
    assert not shown.page.locator("#upload-all").is_visible()


def test_small_files_come_first(shown: Watched) -> None:
    order: list[str] = []

    def note(request: Any) -> None:
        if request.method == "POST" and request.url.endswith("/v1/context_caches"):
            order.append(request.post_data_json["metadata"][0]["source"])

    shown.page.on("request", note)
    shown.drop_all({"long.md": PEOPLE * 20, "short.md": NURSE, "middle.md": PEOPLE * 4})
    assert order == ["short.md", "middle.md", "long.md"]


def test_what_is_cached_can_be_asked_about_while_the_rest_is_not(shown: Watched) -> None:
    begun: list[Any] = []

    def first_only(route: Any) -> None:
        begun.append(route)
        if len(begun) == 1:
            route.continue_()

    shown.page.route("**/v1/context_caches", first_only)
    shown.start_drop({"long.txt": PEOPLE * 120})
    row = shown.page.locator("#library li", has_text="long.txt")
    row.wait_for()
    assert shown.page.locator(".warning:visible").count() == 0, "it is on its way"
    shown.ask("Where does Tom Reyes live?")
    assert shown.answers == ["Oslo"]
    assert shown.page.locator("#upload-all").is_visible()
    with shown.uploading():
        begun[-1].continue_()
        shown.page.unroute("**/v1/context_caches")


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
    [
        (b"PK\0\0", "There is no text to cache: it is not text"),
        (b" \n\n", "There is no text to cache: it is empty"),
    ],
    ids=["bytes", "blank"],
)
def test_what_is_no_text_is_refused_by_name(
    shown: Watched, reading: Served, content: bytes, words: str
) -> None:
    shown.expected = ("400",)
    shown.drop(picture__png=content, nurse__txt=NURSE)
    refused = shown.page.locator("#uploads li")
    assert refused.locator("div").inner_text().startswith(f"picture.png {words}")
    assert shown.page.inner_text("#uploaded") == "Cached nurse.txt: 1 chunk."
    assert len(caches(reading)) == 1
    refused.get_by_role("button", name="Hide picture.png").click()
    assert refused.count() == 0


def test_other_encodings_are_read_and_named(shown: Watched, reading: Served) -> None:
    text = "Käthe Groß wohnt in Köln. Sie ist Bäckerin und backt süßes Gebäck.\n"
    shown.drop(german__txt=text.encode("cp1252"))
    told = "Cached german.txt: 1 chunk. german.txt was read as cp1252."
    assert shown.page.inner_text("#uploaded") == told
    (cache,) = caches(reading)
    assert reading.get(f"/v1/context_caches/{cache['id']}/content").json()["text"] == text


def test_documents_are_converted(
    shown: Watched, reading: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pdfminer").mkdir()
    (tmp_path / "pdfminer" / "__init__.py").touch()
    (tmp_path / "pdfminer" / "high_level.py").write_text(CONVERTER)
    others = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), others])))
    shown.drop(paper__pdf=NURSE.encode())
    (cache,) = caches(reading)
    text = reading.get(f"/v1/context_caches/{cache['id']}/content").json()["text"]
    assert text == f"# Paper\n\n{NURSE}".strip()


def test_the_cost_is_told_before_anything_is_computed(shown: Watched, reading: Served) -> None:
    shown.page.route("**/v1/context_caches", lambda route: None)  # an answer that never comes
    shown.start_drop({"people.md": PEOPLE})
    cost = shown.page.get_by_text(" of KV for ")
    cost.wait_for()
    status = reading.get("/status").json()
    tokens = reading.post("/v1/context_caches/split", {"input": PEOPLE}).json()["data"][0]["tokens"]
    size = tokens * status["kv_bytes_per_token"] / 1000
    assert cost.inner_text().startswith(f"{size:.1f} KB of KV for {len(PEOPLE)} B of text")
    with shown.uploading():
        shown.page.get_by_role("button", name="Cancel people.md").click()


@pytest.mark.parametrize("anyway", [True, False])
def test_what_has_no_room_is_asked_for(shown: Watched, reading: Served, anyway: bool) -> None:
    full = reading.get("/status").json()
    for tier in full["tiers"]:
        tier["used_bytes"] = tier["budget_bytes"] - 1000
    shown.page.route("**/status", lambda route: route.fulfill(json=full))
    with shown.uploading():
        shown.start_drop({"people.md": PEOPLE})
        dialog = shown.page.get_by_role("dialog")
        dialog.get_by_text("but the server has room for 1.0 KB more.").wait_for()
        dialog.get_by_role("button", name="Cache it anyway" if anyway else "Cancel").click()
    assert len(caches(reading)) == int(anyway)


def test_uploads_go_on_behind_one_that_failed(shown: Watched, reading: Served) -> None:
    shown.expected = ("net::ERR",)
    shown.page.route("**/status", lambda route: route.abort())
    shown.drop(people__md=PEOPLE)
    assert "does not answer" in shown.page.locator("#uploads .wrong").inner_text()
    shown.page.unroute("**/status")
    shown.drop(nurse__txt=NURSE)
    assert [cache["metadata"]["source"] for cache in caches(reading)] == ["nurse.txt"]


def test_documents_that_come_in_another_tab_are_shown(shown: Watched) -> None:
    other = Watched(shown.context.new_page(), shown.context, shown.url)
    other.load(shown.url)
    other.drop(nurse__txt=NURSE)
    shown.page.locator("#library summary", has_text="nurse.txt").wait_for()
    other.page.get_by_label("Select nurse.txt").check()
    other.page.locator("#delete-selected").click()
    other.page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    shown.page.get_by_text("Nothing is cached yet.").wait_for()


def interrupted(shown: Watched, reading: Served) -> None:
    """Drop a document of some chunks, and cancel it once the first of them are cached."""
    kept: list[Any] = []

    def first_only(route: Any) -> None:
        if not kept:
            kept.append(route)
            route.continue_()

    shown.page.route("**/v1/context_caches", first_only)
    shown.start_drop({"long.txt": PEOPLE * 120})
    shown.page.locator("#library li", has_text="long.txt").wait_for()
    with shown.uploading():
        shown.page.get_by_role("button", name="Cancel long.txt").click()
    shown.page.unroute("**/v1/context_caches")


def test_an_interrupted_upload_is_resumed(shown: Watched, reading: Served) -> None:
    """Also after the page was loaded anew, for the text is kept until all of it is cached."""
    interrupted(shown, reading)
    before = caches(reading)
    total = int(before[0]["metadata"]["chunks"])
    assert 0 < len(before) < total
    shown.page.reload()
    shown.wait_until_begun()
    shown.page.get_by_text(f"Only {len(before)} of {total} chunks").wait_for()
    with shown.uploading():
        shown.page.get_by_role("button", name="Resume long.txt").click()
    after = caches(reading)
    assert len(after) == total
    assert after[: len(before)] == before, "what was there is not computed again"
    shown.page.get_by_text(f"{total} chunks, ").wait_for()
    assert shown.page.locator(".warning:visible").count() == 0
    kept = shown.page.evaluate(KEPT_UPLOADS)
    assert kept == 0


def test_an_interrupted_upload_is_resumed_with_the_file(shown: Watched, reading: Served) -> None:
    """Where another browser began it."""
    interrupted(shown, reading)
    shown.page.evaluate(FORGET_UPLOADS)
    with shown.uploading(), shown.page.expect_file_chooser() as chooser:
        shown.page.get_by_role("button", name="Resume long.txt").click()
        chooser.value.set_files(
            {"name": "long.txt", "mimeType": "text/plain", "buffer": (PEOPLE * 120).encode()}
        )
    after = caches(reading)
    assert len(after) == int(after[0]["metadata"]["chunks"])


def test_an_interrupted_upload_is_removed(shown: Watched, reading: Served) -> None:
    interrupted(shown, reading)
    shown.page.get_by_role("button", name="Remove long.txt").click()
    shown.page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    shown.page.get_by_text("Nothing is cached yet.").wait_for()
    assert caches(reading) == []


def test_files_can_be_chosen_without_a_mouse(shown: Watched, reading: Served) -> None:
    shown.page.set_input_files(
        "#files", [{"name": "nurse.txt", "mimeType": "text/plain", "buffer": NURSE.encode()}]
    )
    shown.page.get_by_text("Cached nurse.txt: 1 chunk.").wait_for()
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
    assert found.split() == ["nurse.txt", "#1", *NURSE.split()]
    hits.get_by_role("checkbox").check()
    shown.page.get_by_role("button", name="Leave out nurse.txt #1").wait_for()
    shown.ask("Where does Ana Petrov live?")
    assert shown.answers == ["Lima"]
    assert "nurse.txt #1" in shown.page.inner_text("#turns")
    assert shown.page.locator("#chosen li").count() == 0
    shown.page.fill("#query", "zebra")
    shown.page.press("#query", "Enter")
    shown.page.get_by_text("No chunk has any of these words.").wait_for()


def test_documents_can_be_read_chosen_and_deleted(shown: Watched, reading: Served) -> None:
    shown.drop(people__md=PEOPLE, nurse__txt=NURSE)
    document = shown.page.locator("#library > li", has_text="people.md")
    document.locator("summary").click()
    document.get_by_text("Mira Holt lives in Varna.").wait_for()
    shown.page.get_by_label("Select people.md").check()
    shown.page.get_by_role("button", name="Ask about them").click()
    chunk = document.get_by_label("people.md #1")
    assert chunk.is_checked()
    shown.page.get_by_role("button", name="Leave out people.md #1").click()
    assert not chunk.is_checked()
    shown.page.get_by_label("Select people.md").check()
    shown.page.locator("#delete-selected").click()
    dialog = shown.page.get_by_role("dialog")
    assert "Delete “people.md”, 1 chunk?" in dialog.inner_text()
    dialog.get_by_role("button", name="Cancel").click()
    assert len(caches(reading)) == 2
    shown.page.locator("#delete-selected").click()
    dialog.get_by_role("button", name="Delete").click()
    document.wait_for(state="detached")
    assert [cache["metadata"]["source"] for cache in caches(reading)] == ["nurse.txt"]


def test_many_documents_are_filtered_and_deleted_together(shown: Watched, reading: Served) -> None:
    """They are 2,000 here."""
    for begin in range(0, 2000, 100):
        names = [
            f"{'notes' if at % 50 else 'letters'}/{at:04}.md" for at in range(begin, begin + 100)
        ]
        metadata = [{"source": name, "origin": "page"} for name in names]
        reading.cache(*(["Mira bakes.\n"] * 100), metadata=metadata)
    shown.page.reload()
    shown.wait_until_begun()
    page = shown.page
    page.get_by_text("2,000 documents").wait_for()
    page.fill("#filter", "Letters")
    page.get_by_text("40 of 2,000 documents").wait_for()
    page.get_by_label("Select all that are shown").check()
    page.get_by_text("40 selected").wait_for()
    page.get_by_label("Select letters/0050.md").uncheck()
    page.get_by_text("39 selected").wait_for()
    page.locator("#delete-selected").click()
    dialog = page.get_by_role("dialog")
    assert "Delete 39 documents, 39 chunks?" in dialog.inner_text()
    dialog.get_by_role("button", name="Delete").click()
    page.get_by_text("1 of 1,961 documents").wait_for()
    page.fill("#filter", "")
    page.get_by_text("1,961 documents").wait_for()
    took = page.evaluate(FILTER_MILLISECONDS)
    assert took < 1000, "each letter of a filter is answered at once"


def test_names_and_texts_are_shown_as_text(shown: Watched) -> None:
    """What would run in markup runs nowhere: in names, texts, hits, choices, answers and
    prompts."""
    trap = "<img src=x onerror=\"document.title='taken'\">"
    shown.drop_all({trap: f"{trap} <script>document.title = 'taken'</script> Ana lives in Lima.\n"})
    document = shown.page.locator("#library details")
    document.locator("summary").click()
    shown.page.get_by_label("Select all that are shown").check()
    shown.page.get_by_role("button", name="Ask about them").click()
    shown.page.fill("#query", "Lima")
    shown.page.press("#query", "Enter")
    shown.page.locator("#hits li").wait_for()
    shown.ask(f"{trap} Where does Ana live?")
    shown.page.locator("#tokens span").first.click()
    for place in ("#uploaded", "#library", "#hits", "#turns", "#prompt-of"):
        assert trap in shown.page.inner_text(place), place
    assert trap in "".join(shown.page.locator("#tokens span").all_text_contents())
    assert shown.page.locator("img, main script").count() == 0
    assert shown.page.title() == "kvlinker"
    assert not any(url.endswith("/x") for url in shown.requests)
