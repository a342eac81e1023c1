"""Answers as they are shown: their Markdown, which runs and loads nothing, their figures, and those
that were cut."""

from __future__ import annotations

import pytest

from tests.doors.page.conftest import Watched
from tests.doors.page.test_conversation import ENDLESS, body_of
from tests.doors.page.test_documents import PEOPLE

TEXT = """# People

Tom *Reyes* lives in **Oslo**, `Ana` costs $5 or $10.

1. First
2. Second
   - nested, see [a page](https://example.org/page)

- [x] done

| name | age |
|---|---:|
| Tom | 41 |

```python
def home(): return "Oslo"
```

The mean is $\\frac{1}{n}\\sum_i x_i$, and

$$\\sqrt{\\pi}$$

> quoted

Last &amp; least, a < b &lt; c.
"""

PAYLOADS = (
    "<script>document.title = 'taken'</script>",
    "<img src=x onerror=\"document.title='taken'\">",
    '<svg onload="document.title=\'taken\'"><a href="javascript:alert(1)">x</a></svg>',
    "<iframe srcdoc=\"<script>parent.document.title='taken'</script>\"></iframe>",
    '<iframe src="//example.org/"></iframe>',
    '<meta http-equiv=refresh content="0; url=https://example.org/">',
    "<base href=https://example.org/>",
    "<form action=https://example.org/><button>Ask</button></form>",
    "<link rel=stylesheet href=https://example.org/x.css>",
    "<style>@import 'https://example.org/x.css'; body { display: none }</style>",
    "<object data=https://example.org/></object><embed src=https://example.org/>",
    "<video src=https://example.org/x poster=https://example.org/y autoplay></video>",
    '<div style="position: fixed; inset: 0" id=turns onclick="document.title=\'taken\'">x</div>',
    "<math><mtext></mtext><mglyph><style><img src=x onerror=\"document.title='taken'\"></style>",
    "![picture](https://example.org/x.png)",
    "![picture][1]\n\n[1]: https://example.org/x.png",
    "[link](javascript:document.title='taken')",
    "[link](JaVaScRiPt&colon;document.title='taken')",
    "[link](data:text/html,<script>opener.document.title='taken'</script>)",
    "[link](vbscript:x) [link](file:///etc/passwd) [link](//example.org/) [link](/docs)",
    "<javascript:document.title='taken'>",
    "`</code><script>document.title = 'taken'</script>`",
    "```html\n</code></pre><script>document.title = 'taken'</script>\n```",
    '```"><img src=x onerror="document.title=\'taken\'">\ncode\n```',
    "| <img src=x onerror=\"document.title='taken'\"> |\n|---|\n| <script>x</script> |",
    "$\\href{javascript:document.title='taken'}{x}$ $\\includegraphics{https://example.org/x.png}$",
    "$\\text{<img src=x onerror=\"document.title='taken'\">}$",
    "$$\\def\\a{\\a\\a}\\a$$",
    '[1](https://example.org/ "<img src=x onerror=alert(1)>")',
)
"""Texts that would run a script, load something, or leave the page, were they markup."""


def test_markdown_becomes_elements(shown: Watched) -> None:
    shown.answer_with(TEXT)
    shown.ask("Where do people live?")
    answer = shown.page.locator(".turn > .answered")
    answer.locator("math").nth(1).wait_for()
    answer.locator(".code-keyword").first.wait_for()
    assert answer.locator("h3").inner_text() == "People"
    assert answer.locator("em, strong, p > code").all_inner_texts() == ["Reyes", "Oslo", "Ana"]
    assert answer.locator("> ol > li").count() == 2
    assert "costs $5 or $10." in answer.inner_text()
    link = answer.get_by_role("link", name="a page")
    assert link.get_attribute("href") == "https://example.org/page"
    assert (link.get_attribute("target"), link.get_attribute("rel")) == (
        "_blank",
        "noopener noreferrer",
    )
    assert "a page (example.org)" in answer.inner_text(), "it is seen where a link leads"
    assert answer.locator("td").all_inner_texts() == ["Tom", "41"]
    assert answer.locator(".code-keyword").all_inner_texts() == ["def", "return"]
    assert answer.locator("math mfrac").count() == 1
    assert answer.locator("math[display=block]").count() == 1
    assert answer.locator("blockquote").inner_text() == "quoted"
    assert answer.locator("p").last.inner_text() == "Last & least, a < b < c."


def test_what_is_streamed_looks_like_what_is_shown_at_once(shown: Watched) -> None:
    """But for code and formulas, which are coloured and set as they are complete."""
    shown.answer_with(TEXT, size=1)
    shown.ask("Where do people live?")
    answer = shown.page.locator(".turn > .answered")
    answer.locator(".code-keyword").first.wait_for()
    answer.locator("math").nth(1).wait_for()
    streamed = answer.evaluate("element => element.cloneNode(true).innerHTML")
    shown.page.reload()
    shown.wait_until_begun()
    answer.locator(".code-keyword").first.wait_for()
    answer.locator("math").nth(1).wait_for()
    assert answer.evaluate("element => element.cloneNode(true).innerHTML") == streamed


def test_code_has_a_button_that_copies_it(shown: Watched) -> None:
    shown.context.grant_permissions(["clipboard-read", "clipboard-write"])
    shown.answer_with(TEXT)
    shown.ask("How?")
    shown.page.get_by_role("button", name="Copy the code").click()
    shown.page.get_by_text("Copied").wait_for()
    assert shown.page.evaluate("navigator.clipboard.readText()") == 'def home(): return "Oslo"'


def test_nothing_of_an_answer_runs_loads_or_leaves(shown: Watched) -> None:
    shown.drop_all({f"{at}.md": f"{text}\n" for at, text in enumerate(PAYLOADS[:6])})
    for text in PAYLOADS:
        shown.answer_with(text, size=5)
        shown.ask("What do you say?")
        shown.page.get_by_role("button", name="New").click()
        shown.page.locator(".turn").first.wait_for(state="detached")
    shown.answer_with("\n\n".join(PAYLOADS))
    shown.ask(PAYLOADS[0])
    page = shown.page
    assert page.title() == "kvlinker"
    elements = "img, iframe, script, svg, style, form, object, embed, video, base, link, meta"
    forbidden = f"{elements}, [onclick], [onload], [onerror]"
    assert page.locator(f"#turns :is({forbidden})").count() == 0
    links = page.eval_on_selector_all("#turns a", "links => links.map(link => link.href)")
    assert links, "links that lead to pages stay links"
    assert all(link.startswith("https://example.org/") for link in links)
    for target in page.locator("#turns a").all():
        assert target.get_attribute("target") == "_blank"
    assert page.url.startswith(shown.url)


WATCH_WORK = """() => {
  window.added = 0;
  new MutationObserver(changes => {
    for (const { addedNodes } of changes) {
      for (const node of addedNodes) added += 1 + (node.querySelectorAll?.("*").length ?? 0);
    }
  }).observe(document.getElementById("turns"), { childList: true, subtree: true });
}"""


@pytest.mark.parametrize(
    "part",
    [
        "A sentence of **some** words, and another `one` of some more.\n\n",
        "- an item of a list that is long, with **some** words\n",
        "7. an item of a list that has numbers\n",
        "a line of a paragraph that has no end\n",
    ],
    ids=["paragraphs", "list", "numbered", "lines"],
)
def test_a_long_answer_is_not_made_anew_with_each_token(shown: Watched, part: str) -> None:
    """An answer of 800 pieces: the elements that are made for it, all together, are no more than
    its pieces and its length ask for."""
    shown.page.evaluate(WATCH_WORK)
    pieces = 800
    text = part * (pieces * 25 // len(part))
    shown.answer_with(text, size=25)
    shown.ask("Tell me all of it.")
    told = str(shown.page.locator(".turn > .answered").text_content())
    assert told.count(" of ") == text.count(" of ")
    assert shown.page.evaluate("added") < 100 * pieces


def test_long_code_grows_in_place(shown: Watched) -> None:
    shown.page.evaluate(WATCH_WORK)
    shown.answer_with("```text\n" + "a line of code\n" * 1000 + "```", size=50)
    shown.ask("How?")
    assert str(shown.page.locator(".turn pre").text_content()).count("code") == 1000
    assert shown.page.evaluate("added") < 200


def figures(shown: Watched) -> str:
    return shown.page.locator(".turn .figures").last.inner_text()


def test_figures_tell_tokens_and_times(shown: Watched) -> None:
    shown.drop(people__md=PEOPLE)
    shown.ask("Tell me about Oslo, and about Varna, and everything else.")
    told = figures(shown)
    for part in (" token", "first token after ", "all after ", " prompt tokens: "):
        assert part in told
    shown.answer_with("one two three four five", size=4)
    shown.ask("How many?")
    assert "6 tokens · " in figures(shown)
    assert " tokens/s · " in figures(shown)


def test_figures_are_told_of_a_stopped_answer_too(shown: Watched) -> None:
    shown.page.evaluate(ENDLESS)
    shown.page.fill("#question", "Tell me all of it.")
    shown.page.press("#question", "Enter")
    shown.page.locator(".answered", has_text="Once upon").wait_for()
    shown.page.get_by_role("button", name="Stop").click()
    shown.page.get_by_text("Stopped.", exact=True).wait_for()
    assert "2 tokens · " in figures(shown)
    assert "first token after " in figures(shown)
    assert "all after " in figures(shown)


def test_an_answer_that_was_cut_says_so_and_goes_on(shown: Watched) -> None:
    shown.drop(people__md=PEOPLE)
    bodies = body_of(shown)
    with shown.settings():
        shown.page.fill("#answer-tokens", "2")
    shown.ask("Tell me everything that you know about all of them, word by word.")
    cut = shown.page.locator(".cut")
    cut.get_by_text("Cut: this is as long as it may be.").wait_for()
    (before,) = shown.answers
    assert "2 tokens · " in figures(shown)
    cut.get_by_role("button", name="Continue").click()
    shown.page.get_by_text("4 tokens · ").wait_for()
    (after,) = shown.answers
    assert after.startswith(before)
    assert after != before
    assert bodies[1]["messages"][-1] == {"role": "assistant", "content": before}
    assert bodies[1]["continue_final_message"] is True
    shown.page.reload()
    shown.wait_until_begun()
    assert shown.answers == [after]


def test_the_usual_length_is_a_quarter_of_the_window(shown: Watched) -> None:
    with shown.settings():
        shown.page.fill("#answer-tokens", "")
    assert "up to 1,024 tokens" in shown.page.inner_text("#settings-summary")
