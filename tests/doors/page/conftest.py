"""The page in real browsers, over a server with the model in the box. All tests share one server,
and but for ``test_firefox.py`` one Chromium.

Whatever a test does, the page calls nobody but its server, and its console stays empty: that is
checked behind each.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.doors.http.serving import Served
from tests.waiting import PATIENCE

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page, Playwright

CORE = "test_an_answer_is_streamed"
"""The test of the page's main flow: documents, a question, and its answer."""

KEYS = ("key-alpha", "key-beta", "key-gamma", "key-delta", "key-epsilon")

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
FIREFOX = ("firefox-esr", "firefox")

ANSWERED = """([pieces, reason]) => {
  const { fetch } = window;
  window.fetch = (path, options) => {
    if (!path.endsWith("chat/completions")) return fetch(path, options);
    const encoder = new TextEncoder();
    const usage = {
      prompt_tokens: 30, completion_tokens: pieces.length,
      prompt_tokens_details: { cached_tokens: 20, recomputed_tokens: 4 },
    };
    const chunks = [
      ...pieces.map((content, index) => (
        { choices: [{ delta: { content } }], usage: { completion_tokens: index + 1 } }
      )),
      { choices: [{ delta: {}, finish_reason: reason }] },
      { choices: [], usage },
    ];
    const events = [...chunks.map(chunk => JSON.stringify(chunk)), "[DONE]"];
    const body = new ReadableStream({ async pull(controller) {
      await new Promise(done => setTimeout(done));
      if (events.length) controller.enqueue(encoder.encode(`data: ${events.shift()}\\n\\n`));
      else controller.close();
    } });
    return Promise.resolve(new Response(body));
  };
}"""
"""Answers all questions with these pieces, one after the other, as a server would."""

DROP = """files => {
  const transfer = new DataTransfer();
  for (const [name, bytes] of files) transfer.items.add(new File([new Uint8Array(bytes)], name));
  const options = { dataTransfer: transfer, bubbles: true, cancelable: true };
  const dropped = new DragEvent("drop", options);
  document.getElementById("drop").dispatchEvent(dropped);
}"""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """The core has the main flow; the rest of the page's tests take a while together."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent) and item.originalname != CORE:
            item.add_marker(pytest.mark.whole)


@pytest.fixture(scope="package")
def reading(playwright: Playwright, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with the model in the box, which audits all answers; none starts where there is no
    browser."""
    from kvlinker.llm import LLM
    from kvlinker.settings import load_settings
    from tests.doors.http.serving import serving

    settings = load_settings(
        state_dir=tmp_path_factory.mktemp("page"),
        audit="100%",
        kv_slots=8192,
        host_memory=256 * 2**20,
        disk_space=256 * 2**20,
    )
    with serving(LLM.from_settings(settings), settings) as running:
        yield running


@pytest.fixture(scope="package")
def guarded(reading: Served) -> Iterator[Served]:
    """The same behind API keys, of which each test has its own."""
    from tests.doors.http.serving import serving

    settings = reading.llm.settings.model_copy(update={"api_keys": KEYS})
    with serving(reading.llm, settings, closes=False) as running:
        yield running


@pytest.fixture(scope="package")
def playwright() -> Iterator[Playwright]:
    if not any(map(shutil.which, (*CHROMIUM, *FIREFOX))):
        pytest.skip("there is no browser ('make test' as root installs two)")
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed (a package of [dev])"
    )
    with sync_api.sync_playwright() as running:
        yield running


@pytest.fixture(scope="package")
def browser(playwright: Playwright) -> Iterator[Browser]:
    launched = playwright.chromium.launch(executable_path=program("chromium", CHROMIUM))
    yield launched
    launched.close()


@pytest.fixture(scope="package")
def firefox(playwright: Playwright) -> Iterator[Browser]:
    """Firefox as it is installed, which Playwright drives by WebDriver BiDi."""
    launched = playwright.firefox.launch(
        channel="moz-firefox", executable_path=program("firefox-esr", FIREFOX)
    )
    yield launched
    launched.close()


def program(package: str, names: Sequence[str]) -> str:
    """The path of a browser; skips the test where it is missing."""
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.skip(f"{package} is not installed (a Debian package; 'make test' installs it)")
    return found


@dataclass
class Watched:
    """A page, and what was seen of it from outside."""

    page: Page
    context: BrowserContext
    url: str
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    expected: tuple[str, ...] = ()
    """Parts of complaints that the test means to cause."""

    def load(self, url: str) -> None:
        """Open an address, or the one that is open again, and wait until the page has begun."""
        self.page.goto(url)
        self.wait_until_begun()

    def wait_until_begun(self) -> None:
        self.page.locator("body[data-ready]").wait_for()
        self.page.evaluate(
            "document.getElementById('answer-tokens').value = 16"
        )  # the model goes on and on where it knows no answer

    def drop(self, **files: str | bytes) -> None:
        """Drop files on the page; ``__`` in a name stands for a dot."""
        self.drop_all({name.replace("__", "."): content for name, content in files.items()})

    def drop_all(self, files: Mapping[str, str | bytes]) -> None:
        """Drop files on the page, and wait until each is cached or refused."""
        with self.uploading():
            self.start_drop(files)

    def start_drop(self, files: Mapping[str, str | bytes]) -> None:
        """Drop files on the page."""
        contents = {
            name: text.encode() if isinstance(text, str) else text for name, text in files.items()
        }
        self.page.evaluate(DROP, [[name, list(content)] for name, content in contents.items()])

    @contextmanager
    def uploading(self) -> Iterator[None]:
        """Wait until what the block uploads is cached or refused."""
        uploads = self.page.locator("#uploads")
        before = int(uploads.get_attribute("data-batches") or 0)
        yield
        self.page.locator(f"#uploads[data-batches='{before + 1}']").wait_for(state="attached")

    @contextmanager
    def settings(self) -> Iterator[None]:
        """Have the drawer of settings open."""
        self.page.get_by_role("button", name="Settings").click()
        yield
        self.page.get_by_role("button", name="Done").click()

    def ask(self, question: str) -> None:
        """Ask, and wait for the answer and its prompt."""
        before = self.page.locator(".turn .compare").count()
        self.page.fill("#question", question)
        self.page.press("#question", "Enter")
        self.page.locator(".turn .compare").nth(before).wait_for()
        self.page.get_by_text(f"Of “{question}”").wait_for()

    def answer_with(self, text: str, *, size: int = 8, reason: str = "stop") -> None:
        """Have all questions answered with a text, in pieces of so many characters."""
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        self.page.evaluate(ANSWERED, [pieces, reason])

    @property
    def answers(self) -> list[str]:
        return self.page.locator(".turn > .answered").all_inner_texts()


@pytest.fixture
def opened(browser: Browser) -> Iterator[Callable[..., Watched]]:
    with opening(browser) as open_page:
        yield open_page


@contextmanager
def opening(browser: Browser) -> Iterator[Callable[..., Watched]]:
    """Opens pages: ``opened(url, **options of a browser context)``."""
    pages: list[Watched] = []

    def open_page(url: str, **options: object) -> Watched:
        options = {"viewport": {"width": 1280, "height": 900}, "locale": "en-GB"} | options
        context = browser.new_context(**options)
        context.set_default_timeout(1000 * PATIENCE)
        watched = Watched(context.new_page(), context, url)
        pages.append(watched)
        watched.page.on("request", lambda request: watched.requests.append(request.url))
        watched.page.on("pageerror", lambda error: watched.complaints.append(str(error)))
        watched.page.on(
            "console", lambda message: watched.complaints.append(f"{message.type}: {message.text}")
        )
        watched.load(f"{url}/")
        return watched

    yield open_page
    for watched in pages:
        elsewhere = [
            url for url in watched.requests if not url.startswith((f"{watched.url}/", "data:"))
        ]
        complaints = [
            text
            for text in watched.complaints
            if not any(part in text for part in watched.expected)
        ]
        watched.context.close()
        assert not elsewhere, "the page calls nobody but its server"
        assert not complaints


@pytest.fixture
def shown(reading: Served, opened: Callable[..., Watched]) -> Watched:
    """The page of a server that has cached nothing."""
    return fresh_page(reading, opened)


def fresh_page(served: Served, opened: Callable[..., Watched], **options: object) -> Watched:
    """Open the page of a server whose context caches have been deleted."""
    while ids := [
        cache["id"] for cache in served.get("/v1/context_caches?limit=100").json()["data"]
    ]:
        for cache_id in ids:
            served.http.delete(f"/v1/context_caches/{cache_id}")
    watched = opened(served.url, **options)
    watched.page.locator("#library-empty:not([hidden])").wait_for(state="attached")
    watched.page.locator("#policy option").nth(1).wait_for(state="attached")
    return watched
