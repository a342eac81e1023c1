"""The page as a whole: the server's figures, API keys, phones, the dark, the keyboard, and what it
may load."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from tests.doors.http.serving import Served
from tests.doors.page.conftest import Watched, fresh_page
from tests.doors.page.test_conversation import choose_policy
from tests.doors.page.test_documents import NURSE, PEOPLE

if TYPE_CHECKING:
    from playwright.sync_api import Page

PHONE = {"width": 360, "height": 740}


def test_load_tiers_and_audit_are_shown_live(shown: Watched, reading: Served) -> None:
    page = shown.page
    shown.drop(people__md=PEOPLE, nurse__txt=NURSE)
    choose_policy(shown, "legolink", tokens="3")
    shown.ask("Where does Tom Reyes live?")
    page.get_by_role("tab", name="Server").click()
    assert not page.locator("#question").is_visible()
    request = page.locator("#requests tbody tr:not(.running)").first.locator("td")
    request.first.wait_for()
    who, _, policy, prompt, *parts = request.all_inner_texts()
    assert (who, policy) == ("default", "legolink-3")
    assert sum(map(int, parts[:3])) == int(prompt), "cached, recomputed and fresh"
    assert reading.llm.policy_manager.auditor is not None
    assert reading.llm.policy_manager.auditor.wait(30)
    row = page.locator("#audit tr", has_text="legolink-3")
    row.wait_for()
    policy, answers, agreement, alike = row.locator("td").all_inner_texts()
    assert (policy, answers, alike) == ("legolink-3", "1", "100.0%")
    assert agreement == "100.0% (2.5%–100.0%)"
    status = reading.get("/status").json()
    page.get_by_text(f"{status['requests']['finished']:,}", exact=True).first.wait_for()
    tiers = page.locator(".tier").all_inner_texts()
    assert [text.partition(":")[0] for text in tiers] == ["host", "disk"]
    assert f"{status['tiers'][0]['chunks']} chunks" in tiers[0]
    load = page.inner_text("#load")
    for name in ("running", "waiting", "answered", "output tokens", "KV slots in use"):
        assert name in load
    cached = status["prompt_tokens"]["cached"]
    assert f"cached {cached:,}" in page.inner_text("#reuse-legend")
    assert "first token, on average" in page.inner_text("#store")
    assert "–" not in page.inner_text("#store")
    page.get_by_text("All metrics").click()
    page.get_by_text("kvlinker:store_bytes", exact=False).first.wait_for()
    assert re.match(
        r"Under \S+, \d+\.\d% of \d+ compared answers? begin as the full computation would",
        page.inner_text("#audit-state"),
    )


def test_the_last_ten_minutes_are_drawn(shown: Watched) -> None:
    """From counters: what came between two readings of them."""
    page = shown.page
    shown.drop(people__md=PEOPLE, nurse__txt=NURSE)
    page.clock.install()
    page.reload()
    shown.wait_until_begun()
    for question in ("Where does Tom Reyes live?", "Where does Mira Holt live?"):
        shown.ask(question)
        page.clock.run_for(4000)
    page.get_by_role("tab", name="Server").click()
    page.get_by_role("img", name=re.compile(r"First token: mean of those that came \d")).wait_for()
    page.get_by_role("img", name=re.compile("Throughput: prompt tokens .*output tokens")).wait_for()
    page.get_by_role("img", name=re.compile(r"Chunks found, by tier: .*host \d")).wait_for()
    assert page.locator("#chart-first polyline").count() >= 1
    page.reload()
    shown.wait_until_begun()
    page.locator("#chart-first polyline").first.wait_for(state="attached")
    page.clock.run_for(11 * 60_000)
    page.locator("#chart-first polyline").first.wait_for(state="detached")


def test_a_server_that_goes_is_told_until_it_is_back(shown: Watched) -> None:
    shown.expected = ("net::ERR",)
    address = shown.url.removeprefix("http://")
    shown.page.route("**/status", lambda route: route.abort())
    notice = shown.page.locator("#notice")
    notice.get_by_text(f"The server at {address} does not answer.").wait_for()
    shown.page.unroute("**/status")
    shown.page.locator("#notice:empty").wait_for(state="attached")


def test_no_key_is_asked_for_where_none_is_wanted(shown: Watched) -> None:
    assert not shown.page.get_by_label("API key").is_visible()
    assert not shown.page.get_by_role("button", name="Forget the key").is_visible()


def test_a_server_with_keys(guarded: Served, opened: Callable[..., Watched]) -> None:
    watched = opened(guarded.url)
    watched.expected = ("401",)
    page = watched.page
    page.get_by_text("The server asks for an API key.").wait_for()
    page.get_by_label("API key").fill("key-wrong")
    page.get_by_label("API key").press("Enter")
    page.get_by_text("The server does not take this key.").wait_for()
    page.get_by_label("API key").fill("key-alpha")
    page.get_by_label("API key").press("Enter")
    page.get_by_text("Nothing is cached yet.").wait_for()
    assert not page.get_by_label("API key").is_visible()
    watched.drop(nurse__txt=NURSE)
    watched.ask("Where does Ana Petrov live?")
    assert watched.answers == ["Lima"]
    assert page.inner_text("#notice") == ""
    stored = page.evaluate("[sessionStorage.apiKey, localStorage.length, document.cookie]")
    assert stored == ["key-alpha", 0, ""]
    assert not any("key-alpha" in url for url in watched.requests)
    page.reload()
    page.locator("#library summary", has_text="nurse.txt").wait_for()
    page.get_by_role("button", name="Forget the key").click()
    page.get_by_text("The server asks for an API key.").wait_for()
    assert page.evaluate("sessionStorage.apiKey") is None
    page.locator("#library summary").wait_for(state="detached")
    page.get_by_label("API key").fill("key-beta")
    page.get_by_label("API key").press("Enter")
    page.get_by_text("Nothing is cached yet.").wait_for()


def test_the_page_works_under_the_names_that_the_server_answers_to(
    reading: Served, opened: Callable[..., Watched]
) -> None:
    watched = opened(reading.url.replace("127.0.0.1", "localhost"))
    watched.ask("Hello?")


def test_nothing_can_be_loaded_from_elsewhere(shown: Watched) -> None:
    """Not even by a script that came to run in the page."""
    shown.expected = (
        "Content Security Policy",
        "Content-Security-Policy",
        "Refused",
        "Failed to fetch",
        "TrustedScript",
    )
    assert (
        shown.page.evaluate("fetch('https://example.org/').then(() => 'loaded', () => 'refused')")
        == "refused"
    )
    ran = shown.page.evaluate(
        """() => { const script = document.createElement("script");
        try { script.textContent = "window.ran = true" } catch { return "refused" }
        document.body.append(script); return window.ran ? "ran" : "ignored" }"""
    )
    assert ran == "refused"
    assert not any("example.org" in url for url in shown.requests)


def test_a_phone_needs_no_sideways_scrolling(
    reading: Served, opened: Callable[..., Watched]
) -> None:
    watched = fresh_page(reading, opened, viewport=PHONE, has_touch=True, is_mobile=True)
    page = watched.page
    page.get_by_role("button", name="Conversations and documents").click()
    watched.drop_all({"a-long-name-without-a-space" * 5 + ".txt": NURSE + "W" * 300 + "\n"})
    page.locator("#library summary").click()
    fits(page)
    page.get_by_role("button", name="Close", exact=True).click()
    choose_policy(watched, "cacheblend")
    watched.ask("Where does Ana Petrov live?" + "?" * 200)
    page.get_by_role("button", name="Compare with the full computation").click()
    page.locator(".verdict").wait_for()
    fits(page)
    page.get_by_role("tab", name="Server").click()
    page.get_by_text("All metrics").click()
    page.locator("#metrics pre").filter(has_text="kvlinker").wait_for()
    fits(page)


def fits(page: Page) -> None:
    """Assert that a phone shows the page's whole width, and that fingers hit its buttons."""
    width = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert width == [PHONE["width"]] * 2
    for button in page.get_by_role("button").all():
        box = button.bounding_box()
        assert box is None or box["height"] >= 32, "a finger hits it"


@pytest.mark.parametrize("width", [360, 390, 430])
def test_on_a_phone_the_question_stays_at_the_bottom(
    reading: Served, opened: Callable[..., Watched], width: int
) -> None:
    screen = PHONE | {"width": width}
    watched = fresh_page(reading, opened, viewport=screen, has_touch=True, is_mobile=True)
    page = watched.page
    at_bottom(page)
    watched.drop(nurse__txt=NURSE)
    watched.ask("Where does Ana Petrov live?")
    for element in ("#conversation-title", "#tokens", "#comparison"):
        page.locator(element).evaluate("element => element.scrollIntoView()")
        at_bottom(page)
    for button in page.get_by_role("button").all():
        lines = button.evaluate("element => element.getClientRects().length")
        assert lines <= 1, "no button breaks"
    assert broken_words(page) == []


def at_bottom(page: Page) -> None:
    """Assert that the field for the question is seen, at the screen's end."""
    box = page.locator("#ask").bounding_box()
    assert box is not None
    assert box["y"] + box["height"] == pytest.approx(PHONE["height"], abs=1)


def broken_words(page: Page) -> list[str]:
    """The short words that stand on two lines, but for those of the prompt's tokens."""
    found: list[str] = page.evaluate(BROKEN)
    return found


BROKEN = """() => {
  const broken = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode;
    const around = node.parentElement;
    if (around.closest("#tokens, pre, script") || !around.checkVisibility()) continue;
    for (const { 0: word, index } of node.data.matchAll(/[\\w]{2,20}/g)) {
      const range = document.createRange();
      range.setStart(node, index);
      range.setEnd(node, index + word.length);
      const tops = new Set(Array.from(range.getClientRects(), ({ top }) => Math.round(top)));
      if (tops.size > 1) broken.push(word);
    }
  }
  return broken;
}"""


CONTRAST = """() => {
  const read = colour => {
    const canvas = new OffscreenCanvas(1, 1).getContext("2d");
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return Array.from(canvas.getImageData(0, 0, 1, 1).data.slice(0, 3), value => {
      const share = value / 255;
      return share <= .04045 ? share / 12.92 : ((share + .055) / 1.055) ** 2.4;
    });
  };
  const light = colour => read(colour).reduce(
    (sum, value, index) => sum + value * [.2126, .7152, .0722][index], 0);
  const card = light(getComputedStyle(document.getElementById("conversation")).backgroundColor);
  const contrast = element => {
    const own = light(getComputedStyle(element).color);
    return (Math.max(own, card) + .05) / (Math.min(own, card) + .05);
  };
  const texts = ["h2", ".faint", "label", "dt", ".turn .answered", "#tokens span", "a[href=docs]"];
  return [card, ...texts.map(text => contrast(document.querySelector("main " + text)))];
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_can_be_read_by_day_and_in_the_dark(
    reading: Served, opened: Callable[..., Watched], scheme: str
) -> None:
    watched = fresh_page(reading, opened, color_scheme=scheme)
    watched.drop(nurse__txt=NURSE)
    watched.ask("Where does Ana Petrov live?")
    card, *contrasts = watched.page.evaluate(CONTRAST)
    assert card > 0.5 if scheme == "light" else card < 0.05
    assert min(contrasts) >= 4.5, "WCAG's level AA"


def test_all_of_it_works_by_keyboard(shown: Watched) -> None:
    page = shown.page
    shown.drop(people__md=PEOPLE, nurse__txt=NURSE)
    keys = page.keyboard
    keys.press("/")
    keys.type("pilot")
    keys.press("Enter")
    page.locator("#hits input").wait_for()
    focused = page.locator(":focus")
    keys.press("Tab")
    keys.press("Tab")
    assert focused.get_attribute("type") == "checkbox"
    keys.press("Space")
    keys.press("Escape")
    keys.press("q")
    assert focused.get_attribute("id") == "question"
    keys.type("Where does Tom Reyes live?")
    keys.press("Enter")
    page.locator(".turn .compare").wait_for()
    assert shown.answers == ["Oslo"]
    keys.press("Tab")
    assert focused.evaluate("element => getComputedStyle(element).outlineStyle") == "solid", (
        "focus is seen"
    )
    focused.evaluate("element => element.blur()")
    keys.press("p")
    assert focused.get_attribute("id") == "tokens"
    for _ in range(3):
        keys.press("ArrowRight")
    assert page.inner_text("#token").startswith("token 2, ")
    assert page.locator("#tokens .current").get_attribute("data-position") == "2"
    keys.press("l")
    keys.press("ArrowRight")
    assert page.inner_text("#layer-name").startswith("0 of")
    keys.press("c")
    page.locator(".verdict").wait_for()
    keys.press("?")
    assert page.locator("#shortcuts").is_visible()
    keys.press("Escape")
    assert not page.locator("#shortcuts").is_visible()


def test_the_first_tab_stop_leads_past_everything_to_the_question(shown: Watched) -> None:
    shown.page.keyboard.press("Tab")
    assert shown.page.locator(":focus").inner_text() == "To the question"
    shown.page.keyboard.press("Enter")
    shown.page.keyboard.type("typed")
    assert shown.page.input_value("#question") == "typed"


def test_every_control_has_a_name(shown: Watched) -> None:
    shown.drop(nurse__txt=NURSE)
    shown.page.locator("#library summary").click()
    shown.ask("Where does Ana Petrov live?")
    for kind in (
        "button",
        "checkbox",
        "textbox",
        "searchbox",
        "spinbutton",
        "combobox",
        "slider",
        "link",
        "group",
    ):
        for control in shown.page.get_by_role(kind).all():
            told = control.aria_snapshot().splitlines()[0]
            assert '"' in told or kind == "group", f"{told} has no name"


def test_all_routes_are_told(reading: Served, opened: Callable[..., Watched]) -> None:
    page = opened(reading.url).page
    page.get_by_role("tab", name="Server").click()
    page.get_by_role("link", name="All routes").click()
    page.get_by_text("/v1/context_caches/search").wait_for()
