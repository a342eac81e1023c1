"""The menu of models, the theme, and a conversation as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.doors.http.serving import Served
from tests.doors.page.conftest import Watched
from tests.doors.page.test_conversations import exported
from tests.doors.page.test_documents import NURSE, PEOPLE

if TYPE_CHECKING:
    from playwright.sync_api import Page

OTHER = {
    "name": "/models/other-1b",
    "nbytes": 2_400_000_000,
    "weights": "bfloat16 (safetensors)",
    "window": 32768,
    "is_loaded": False,
}


def test_the_menu_tells_of_the_model_and_lists_others(shown: Watched, reading: Served) -> None:
    page = shown.page
    page.locator("#model", has_text="reader").click()
    facts = page.locator("#model-facts")
    facts.get_by_text("safetensors").wait_for()
    told = facts.inner_text()
    status = reading.get("/status").json()
    assert f"{status['parameters'] / 1e6:.2g} million" in told
    assert "4,096 tokens" in told
    assert "MB" in told or "GB" in told
    page.keyboard.press("Escape")
    assert not facts.is_visible()


def test_another_model_is_loaded_with_progress(shown: Watched) -> None:
    """As the server would; tests/cli has one that does."""
    shown.expected = ("503",)
    page = shown.page
    asked: list[Any] = []
    loading = {"error": {"message": "Loading /models/other-1b: 40%.", "code": "model_loading"}}

    def known(route: Any) -> None:
        own = route.fetch().json()["data"][0] | {"is_loaded": len(asked) < 3}
        other = OTHER | {"is_loaded": len(asked) >= 3}
        if len(asked) == 1:
            asked.append(None)
            route.fulfill(status=503, json=loading)
        elif len(asked) == 2:
            page.get_by_text("Loading /models/other-1b: 40%.").wait_for()
            asked.append(None)
            route.fulfill(json={"data": [own, other | {"is_loaded": True}], "failure": None})
        else:
            route.fulfill(json={"data": [own, other], "failure": None})

    def load(route: Any) -> None:
        asked.append(route.request.post_data_json)
        route.fulfill(status=202, json={"model": OTHER["name"]})

    page.route("**/v1/models/known", known)
    page.route("**/v1/models/load", load)
    page.locator("#models > summary").click()
    page.get_by_text("2.4 GB, bfloat16 (safetensors), 32,768 tokens").wait_for()
    page.get_by_role("button", name="Load /models/other-1b").click()
    page.get_by_role("dialog").get_by_role("button", name="Load").click()
    page.get_by_text("/models/other-1b is loaded.").wait_for()
    assert asked[0] == {"model": "/models/other-1b"}


def background(page: Page) -> str:
    colour: str = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return colour


def test_the_theme_is_switched_and_kept(shown: Watched) -> None:
    page = shown.page
    light = background(page)
    page.get_by_role("button", name="Theme: system").click()
    page.get_by_role("button", name="Theme: light").click()
    page.get_by_role("button", name="Theme: dark").wait_for()
    assert background(page) != light
    page.reload()
    shown.wait_until_begun()
    assert background(page) != light
    page.get_by_role("button", name="Theme: dark").click()
    assert background(page) == light
    assert page.evaluate("localStorage.length") == 0


def test_a_conversation_is_one_file_with_its_sources(shown: Watched, tmp_path: Path) -> None:
    shown.drop(people__md=PEOPLE, nurse__txt=NURSE)
    shown.answer_with("In **Oslo** [1]; see <script>document.title = 'taken'</script> $x^2$.")
    shown.ask("Where does Tom Reyes live?")
    shown.page.locator("math").wait_for()
    name, text = exported(shown, "As a page with its sources")
    assert name == "Where does Tom Reyes live.html"
    file = tmp_path / "exported.html"
    file.write_text(text)
    page = shown.context.new_page()
    page.goto(file.as_uri())
    assert page.title() == "Where does Tom Reyes live?"
    assert page.locator("strong", has_text="Oslo").count() == 1
    assert page.locator("math").count() == 1
    assert page.locator("script, button").count() == 0
    page.get_by_role("link", name="[1]").click()
    assert page.url.endswith("#source-1")
    sources = page.locator(".passage").all_inner_texts()
    assert sorted(each.strip() for each in sources) == sorted([NURSE.strip(), PEOPLE.strip()])
    assert "http" not in page.content().replace("http-equiv", "").replace("http://www.w3.org/", "")
