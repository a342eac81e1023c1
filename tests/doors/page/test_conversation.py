"""The conversation on the page: streamed answers, what became of each token, and the full
computation beside them."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tests.doors.http.serving import Served
from tests.doors.page.conftest import Watched
from tests.doors.page.test_documents import NURSE, PEOPLE

CHAT = "**/v1/chat/completions"

EVENTS = "text/event-stream"

LAYERS = 6


def body_of(shown: Watched) -> list[dict[str, Any]]:
    """Note the bodies of all chat requests from now on."""
    bodies: list[dict[str, Any]] = []

    def note(request: Any) -> None:
        if request.url.endswith("/v1/chat/completions"):
            bodies.append(request.post_data_json)

    shown.page.on("request", note)
    return bodies


def choose_policy(shown: Watched, family: str, **parameters: str) -> None:
    with shown.settings():
        shown.page.select_option("#policy", family)
        for name, value in parameters.items():
            field = shown.page.locator(f"#parameters [name={name}]")
            if field.evaluate("field => field.tagName") == "SELECT":
                field.select_option(value)
            else:
                field.fill(value)


def name_policy(shown: Watched, name: str) -> None:
    with shown.settings():
        shown.page.select_option("#policy", "other")
        shown.page.fill("#policy-name", name)


def states(shown: Watched) -> list[str]:
    """What each token is coloured as, in the layer that is chosen."""
    found: list[str] = shown.page.eval_on_selector_all(
        "#tokens span",
        "spans => spans.map(span => ['cached', 'recomputed', 'fresh'].filter(s =>"
        " span.classList.contains(s)).join())",
    )
    return found


def counts(found: list[str]) -> list[int]:
    return [found.count(state) for state in ("cached", "recomputed", "fresh")]


def legend(shown: Watched) -> list[int]:
    return [
        int(text.split()[-1].replace(",", ""))
        for text in shown.page.locator("#legend li").all_inner_texts()
    ]


def usage(shown: Watched) -> list[int]:
    """Cached, recomputed and fresh tokens, as the last turn tells them from the answer's usage."""
    told = shown.page.locator(".turn .figures").last.inner_text().partition("prompt tokens: ")[2]
    return [int(part.split()[0].replace(",", "")) for part in told.split(", ")]


def shades(shown: Watched) -> np.ndarray:
    read = "spans => spans.map(span => Number(span.style.getPropertyValue('--shade')))"
    return np.array(shown.page.eval_on_selector_all("#tokens span", read))


def test_an_answer_is_streamed(shown: Watched) -> None:
    shown.drop(people__md=PEOPLE)
    shown.page.evaluate(
        """() => { window.seen = []; new MutationObserver(() => {
          const text = document.querySelector(".turn .answered").textContent;
          if (text && seen.at(-1) !== text) seen.push(text);
        }).observe(document.getElementById("turns"),
          { childList: true, subtree: true, characterData: true }) }"""
    )
    bodies = body_of(shown)
    shown.ask("Who lives in Oslo?")
    seen = shown.page.evaluate("seen")
    assert seen[-1] == shown.answers[0]
    assert len(seen) > 1
    assert all(after.startswith(before) for before, after in pairwise(seen))
    assert bodies[0]["stream"] is True
    assert shown.page.input_value("#question") == ""


def test_a_conversation_goes_on(shown: Watched) -> None:
    shown.drop(people__md=PEOPLE, nurse__txt=NURSE)
    bodies = body_of(shown)
    shown.ask("Where does Tom Reyes live?")
    shown.ask("Where does Ana Petrov live?")
    first, second = (body["messages"] for body in bodies)
    assert second[:1] == first
    assert second[1] == {"role": "assistant", "content": shown.answers[0]}
    assert shown.answers[0] == "Oslo"
    shown.page.get_by_role("button", name="New").click()
    shown.page.locator(".turn").first.wait_for(state="detached")
    shown.ask("Where does Mira Holt live?")
    assert shown.answers == ["Varna"]
    assert len(bodies[2]["messages"]) == 1


def test_tokens_are_coloured_as_the_policy_links_them(shown: Watched, reading: Served) -> None:
    """Under legolink-2, two tokens of every chunk but the first, which stands where it was
    computed, are recomputed."""
    people = PEOPLE.replace("Mira", "Lena")  # no earlier prompt has left it computed in full
    shown.drop(people__md=people, nurse__txt=NURSE)
    choose_policy(shown, "legolink", tokens="2")
    bodies = body_of(shown)
    shown.ask("Where does Tom Reyes live?")
    (message,) = bodies[0]["messages"]
    assert bodies[0]["link"]["policy"] == "legolink-2"
    ids = [part["id"] for part in message["content"] if part["type"] == "context_cache"]
    assert len(ids) == 2
    tokens = reading.post("/tokenize", {"messages": [message]}).json()["tokens"]
    expected = ["fresh"] * len(tokens)
    for number, cache_id in enumerate(ids):
        chunk = reading.get(f"/v1/context_caches/{cache_id}/content").json()["token_ids"]
        start = next(i for i in range(len(tokens)) if tokens[i : i + len(chunk)] == chunk)
        expected[start : start + len(chunk)] = ["cached"] * len(chunk)
        if number:
            expected[start : start + 2] = ["recomputed"] * 2
    found = states(shown)
    changed = [(seen, state) for seen, state in zip(found, expected, strict=True) if seen != state]
    assert set(changed) <= {("cached", "fresh")}, (
        "but for what an earlier prompt left of the header"
    )
    assert len(changed) <= 2
    assert counts(found) == usage(shown) == legend(shown)
    text = "".join(shown.page.locator("#tokens span").all_text_contents())
    assert NURSE in text
    assert people in text
    assert text.endswith("Where does Tom Reyes live?<|end|><|assistant|>")


@pytest.mark.parametrize("policy", ["naive", "query"])
def test_colours_are_the_usage_also_where_an_earlier_turn_is_reused(
    shown: Watched, policy: str
) -> None:
    shown.drop(people__md=PEOPLE, nurse__txt=NURSE)
    choose_policy(shown, policy)
    with shown.settings():
        shown.page.fill("#limit", "1")
    for question in ("Where does Tom Reyes live?", "Where does Ana Petrov live?"):
        shown.ask(question)
        assert counts(states(shown)) == usage(shown) == legend(shown)
    shown.page.locator("#tokens span").nth(1).click()
    assert "from an earlier request" in shown.page.inner_text("#token")
    shown.page.get_by_role("button", name="Show the prompt").first.click()
    shown.page.get_by_text("Of “Where does Tom Reyes live?”").wait_for()


def test_layers_have_their_own_colours_and_shades(shown: Watched, reading: Served) -> None:
    """CacheBlend computes all of a prompt's chunks in the first layer, and ever fewer tokens of
    them behind it."""
    shown.drop(people__md=PEOPLE.replace("Mira", "Vera"), nurse__txt=NURSE)
    choose_policy(shown, "cacheblend", percent="20")
    bodies = body_of(shown)
    shown.ask("Where does Tom Reyes live?")
    body = {
        "messages": bodies[0]["messages"],
        "link": {"policy": "cacheblend-20", "attention": True},
    }
    attention = np.array(reading.post("/v1/link/explain", body).json()["attention"])
    assert attention.shape == (LAYERS, len(states(shown)))
    np.testing.assert_allclose(
        shades(shown), np.sqrt(attention.mean(0) / attention.mean(0).max()), atol=5e-3
    )
    shown.page.focus("#layer")
    recomputed = []
    for layer in range(LAYERS):
        shown.page.keyboard.press("ArrowRight")
        assert shown.page.inner_text("#layer-name") == f"{layer} of 0 to {LAYERS - 1}"
        np.testing.assert_allclose(
            shades(shown), np.sqrt(attention[layer] / attention[layer].max()), atol=5e-3
        )
        assert counts(states(shown)) == legend(shown)
        recomputed.append(counts(states(shown))[1])
    assert recomputed[0] > recomputed[1] >= recomputed[-1]
    assert round(sum(recomputed) / LAYERS) == usage(shown)[1]
    shown.page.get_by_label("Shade by the question's attention").uncheck()
    assert not shades(shown).any()


def test_the_choice_of_the_servers_policy_is_explained(shown: Watched) -> None:
    def measured(route: Any) -> None:
        told = route.fetch().json()
        told["auto"]["measured"] = [
            {"policy": policy, "answer_kl": kl, "agreement": 0.9, "recomputed": 0, "prompts": 8}
            for policy, kl in (("row", 0.0712), ("row+query-5-sensitive", 0.0321))
        ]
        route.fulfill(json=told)

    meaning = shown.page.locator("#policy-meaning")
    assert "Once the server has been idle" in str(meaning.text_content())
    shown.page.route("**/v1/policies", measured)
    shown.page.reload()
    shown.page.wait_for_function("document.querySelector('#policy').length > 1")
    told = str(meaning.text_content())
    assert "by 0.071 with row, 0.032 with row+query-5-sensitive (mean KL" in told
    assert "at most 0.05 is chosen" in told


def test_policies_are_put_together_from_their_parameters(shown: Watched) -> None:
    offered = shown.page.locator("#policy option").all_text_contents()
    assert offered[0] == "the server's (row+query-5-sensitive)"
    assert {"full", "cacheblend", "legolink", "another, by name"} <= set(offered)
    bodies = body_of(shown)
    choose_policy(shown, "cacheblend", percent="25", schedule="onestep", spread="")
    assert "KV deviation" in str(shown.page.text_content("#policy-meaning"))
    assert shown.page.inner_text("#settings-summary").startswith("cacheblend-25-onestep · ")
    shown.ask("Hello?")
    name_policy(shown, "query-5+legolink-2")
    shown.ask("Hello again?")
    assert [body["link"]["policy"] for body in bodies] == [
        "cacheblend-25-onestep",
        "query-5+legolink-2",
    ]


def test_an_engine_that_explains_no_answers_is_asked_apart(shown: Watched) -> None:
    """vLLM refuses ``link.explain``; its /v1/link/explain tells all but the attention then."""
    shown.expected = ("400",)
    shown.drop(people__md=PEOPLE)

    def refuse(route: Any) -> None:
        if route.request.post_data_json["link"].get("explain"):
            error = {
                "message": "no",
                "type": "invalid_request_error",
                "param": "link.explain",
                "code": "invalid_value",
            }
            route.fulfill(status=400, json={"error": error})
        else:
            route.fallback()

    def explain(route: Any) -> None:
        answer = route.fetch()
        route.fulfill(response=answer, json=answer.json() | {"attention": None})

    shown.page.route(CHAT, refuse)
    shown.page.route("**/v1/link/explain", explain)
    for question in ("Where does Tom Reyes live?", "Where does Mira Holt live?"):
        shown.ask(question)
    assert shown.answers == ["Oslo", "Varna"]
    assert sum(counts(states(shown))) == sum(usage(shown))
    assert not shades(shown).any()
    assert shown.page.get_by_label("Shade by the question's attention").is_disabled()


def test_errors_are_told_and_the_question_stays(shown: Watched) -> None:
    shown.expected = ("400",)
    name_policy(shown, "nonsense")
    shown.page.fill("#question", "Where?")
    shown.page.press("#question", "Enter")
    shown.page.locator("#failure .wrong").wait_for()
    assert "nonsense" in shown.page.inner_text("#failure")
    assert "`" not in shown.page.inner_text("#failure")
    assert shown.page.input_value("#question") == "Where?"
    assert shown.page.locator(".turn").count() == 0
    with shown.settings():
        shown.page.select_option("#policy", "")
    shown.ask("Where does anybody live?")
    assert shown.page.inner_text("#failure") == ""


def test_a_server_that_is_gone_is_named(shown: Watched) -> None:
    shown.expected = ("net::ERR",)
    shown.page.route(CHAT, lambda route: route.abort())
    shown.page.route("**/search", lambda route: route.abort())
    shown.page.fill("#question", "Where?")
    shown.page.press("#question", "Enter")
    shown.page.locator("#failure .wrong").wait_for()
    address = shown.url.removeprefix("http://")
    assert f"The server at {address} does not answer." in shown.page.inner_text("#failure")


def test_an_answer_that_breaks_off_says_so(shown: Watched) -> None:
    chunk = {"choices": [{"index": 0, "delta": {"content": "Os"}}]}
    body = f"data: {json.dumps(chunk)}\n\ndata: {json.dumps({'error': {'message': 'gone'}})}\n\n"
    shown.page.route(CHAT, lambda route: route.fulfill(body=body, content_type=EVENTS))
    shown.page.fill("#question", "Where?")
    shown.page.press("#question", "Enter")
    shown.page.locator("#failure .wrong").wait_for()
    assert shown.page.inner_text("#failure") == "gone"
    assert shown.page.input_value("#question") == "Where?"


def test_a_stream_that_ends_too_early_says_so(shown: Watched) -> None:
    body = f"data: {json.dumps({'choices': [{'index': 0, 'delta': {'content': 'Os'}}]})}\n\n"
    shown.page.route(CHAT, lambda route: route.fulfill(body=body, content_type=EVENTS))
    shown.page.fill("#question", "Where?")
    shown.page.press("#question", "Enter")
    shown.page.locator("#failure .wrong").wait_for()
    assert shown.page.inner_text("#failure").startswith("The connection broke off")


def test_an_answer_can_be_stopped(shown: Watched, reading: Served) -> None:
    shown.page.route(CHAT, lambda route: None)  # an answer that never comes
    shown.page.fill("#question", "Where?")
    shown.page.press("#question", "Enter")
    shown.page.get_by_role("button", name="Stop").wait_for()
    shown.page.keyboard.press("Escape")
    shown.page.get_by_text("Stopped before the answer began.").wait_for()
    assert shown.page.get_by_role("button", name="Ask", exact=True).is_enabled()


ENDLESS = """() => {
  const { fetch } = window;
  window.fetch = (path, options) => {
    if (!path.endsWith("chat/completions")) return fetch(path, options);
    const chunk = {
      choices: [{ index: 0, delta: { content: "Once upon" } }], usage: { completion_tokens: 2 },
    };
    const body = new ReadableStream({ start(controller) {
      controller.enqueue(new TextEncoder().encode(`data: ${JSON.stringify(chunk)}\\n\\n`));
      options.signal.addEventListener("abort", () => controller.error(options.signal.reason));
    } });
    return Promise.resolve(new Response(body));
  };
}"""
"""An answer that begins and never ends, unless it is stopped."""


def test_what_came_before_a_stop_is_kept(shown: Watched) -> None:
    shown.page.evaluate(ENDLESS)
    shown.page.fill("#question", "Tell me all of it.")
    shown.page.press("#question", "Enter")
    shown.page.locator(".answered", has_text="Once upon").wait_for()
    shown.page.get_by_role("button", name="Stop").click()
    shown.page.get_by_text("Stopped.", exact=True).wait_for()
    shown.page.reload()
    shown.page.get_by_text("Stopped.", exact=True).wait_for()
    assert shown.answers == ["Once upon"]
