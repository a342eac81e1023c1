"""Policies side by side on one prompt: texts, quality, times and work."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from tests.doors.http.serving import Served
from tests.doors.page.conftest import Watched
from tests.doors.page.test_conversation import CHAT, EVENTS, body_of, choose_policy, usage
from tests.doors.page.test_documents import NURSE, PEOPLE

PRONOUNS = (
    "Ana Petrov lives in Lima.\n\nShe works as a nurse.\n\nTom Reyes lives in Oslo.\n\n"
    "He works as a pilot.\n\n"
)
"""A text whose paragraphs mean less when each is read alone."""

COMPARE = "Compare with the full computation"


def compare(shown: Watched) -> None:
    shown.page.get_by_role("button", name=COMPARE).last.click()
    shown.page.locator(".verdict").wait_for()


def figures(shown: Watched, policy: str) -> dict[str, str]:
    """What the card of a policy tells."""
    card = shown.page.locator(".side").filter(has=shown.page.get_by_role("heading", name=policy))
    return dict(
        zip(card.locator("dt").all_inner_texts(), card.locator("dd").all_inner_texts(), strict=True)
    )


def test_the_full_computation_beside_an_answer(shown: Watched) -> None:
    shown.drop(people__md=PEOPLE, nurse__txt=NURSE)
    bodies = body_of(shown)
    shown.ask("Where does Tom Reyes live?")
    compare(shown)
    timed = [body for body in bodies[1:] if body.get("stream")]
    assert [body["link"]["policy"] for body in timed] == ["full", "row+query-5-sensitive"]
    assert all(body["messages"] == bodies[0]["messages"] for body in timed)
    assert len({body["cache_salt"] for body in timed}) == 2, "no time is that of what was left"
    assert "Both answers are the same, word for word." in shown.page.inner_text(".verdict")
    linked, full = shown.page.locator(".side").all_inner_texts()
    assert linked.startswith("row+query-5")
    assert full.startswith("full")
    assert "Oslo" in linked
    assert "Oslo" in full
    prompt = sum(usage(shown))
    assert figures(shown, "full")["computed"] == f"{prompt} of {prompt} tokens"
    assert figures(shown, "full")["recomputed"] == "100.0%"
    assert shown.page.locator(".side mark").count() == 0


def test_the_difference_is_the_divergence_of_the_answers_tokens(
    shown: Watched, reading: Served
) -> None:
    """As it is without the page, but for bf16, in which company changes the last bits."""
    shown.page.get_by_text("How they are split").click()
    shown.page.select_option("#split-method", "paragraph")
    shown.drop(people__md=PRONOUNS)
    shown.page.get_by_label("Select people.md").check()
    shown.page.get_by_role("button", name="Ask about them").click()
    choose_policy(shown, "naive")
    bodies = body_of(shown)
    shown.ask("What does Tom Reyes work as?")
    compare(shown)
    body = {key: bodies[0][key] for key in ("messages", "max_tokens")} | {
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 20,
    }
    answers = [
        reading.post("/v1/chat/completions", body | {"link": {"policy": policy}}).json()
        for policy in ("naive", "full")
    ]
    assert [answer["choices"][0]["finish_reason"] for answer in answers] == ["stop", "stop"]
    # but for the tokens that end the answers, which are no part of their texts
    naive, full = (answer["choices"][0]["logprobs"]["content"][:-1] for answer in answers)
    assert [each["token"] for each in naive] == [each["token"] for each in full], (
        "so the full answer's own distributions are those along the naive one"
    )
    divergences = []
    for ours, whole in zip(naive, full, strict=True):
        q = {each["token"]: each["logprob"] for each in ours["top_logprobs"]}
        p = {each["token"]: each["logprob"] for each in whole["top_logprobs"]}
        both = p.keys() & q.keys()
        rest_p = 1 - sum(math.exp(p[token]) for token in both)
        rest_q = 1 - sum(math.exp(q[token]) for token in both)
        divergences.append(
            sum(math.exp(p[token]) * (p[token] - q[token]) for token in both)
            + (rest_p * math.log(rest_p / rest_q) if min(rest_p, rest_q) > 1e-9 else 0)
        )
    expected = sum(divergences) / len(divergences)
    assert expected > 0.001, "else there is nothing to measure"
    told = figures(shown, "naive")["KL to full, in nats"]
    assert float(told) == pytest.approx(expected, rel=0.2)
    assert figures(shown, "naive")["recomputed"] == "0.0%"


def test_a_slider_measures_other_policies(shown: Watched) -> None:
    shown.drop(people__md=PEOPLE, nurse__txt=NURSE)
    shown.ask("Where does Tom Reyes live?")
    compare(shown)
    bodies = body_of(shown)
    slider = shown.page.get_by_label("Recompute more or less")
    assert slider.get_attribute("aria-valuetext") == "row+query-5-sensitive"
    slider.focus()
    shown.page.keyboard.press("Home")
    assert slider.get_attribute("aria-valuetext") == "naive"
    assert bodies == [], "nothing is measured that was not asked for"
    shown.page.get_by_role("button", name="Measure").click()
    shown.page.locator(".side").nth(2).wait_for()
    names = shown.page.locator(".side h3").all_inner_texts()
    assert names == ["naive", "row+query-5-sensitive", "full"], "by what they compute"
    assert [body["link"]["policy"] for body in bodies if body.get("stream")] == ["naive"]
    shown.page.get_by_role("button", name="Use from now on").click()
    assert shown.page.inner_text("#settings-summary").startswith("naive · ")
    shown.ask("Where does Mira Holt live?")
    assert bodies[-1]["link"]["policy"] == "naive"


def test_differences_are_marked(shown: Watched) -> None:
    """The full computation's answer is a made-up one here, so that there is a difference."""
    shown.drop(people__md=PEOPLE)
    shown.ask("Where does Tom Reyes live?")
    details = {"cached_tokens": 0, "recomputed_tokens": 20, "exact_cached_tokens": 0}
    chunk = {
        "choices": [{"index": 0, "delta": {"content": "Rome on Tuesdays"}}],
        "usage": {"prompt_tokens": 30, "prompt_tokens_details": details},
    }
    told = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"

    def answer(route: Any) -> None:
        body = route.request.post_data_json
        if body["link"]["policy"] == "full" and body.get("stream"):
            route.fulfill(body=told, content_type=EVENTS)
        else:
            route.fallback()

    shown.page.route(CHAT, answer)
    shown.page.keyboard.press("Escape")
    shown.page.locator("#question").blur()
    shown.page.keyboard.press("c")
    shown.page.locator(".verdict").wait_for()
    assert "The answers differ from word 1 on." in shown.page.inner_text(".verdict")
    linked, full = shown.page.locator(".side").all()
    assert linked.locator("mark").all_inner_texts() == ["Oslo"]
    assert "Rome on Tuesdays" in full.inner_text()
    assert figures(shown, "full")["computed"] == "30 of 30 tokens"


def test_one_sentence_says_what_linking_did(shown: Watched) -> None:
    shown.ask("Hello?")
    assert "Nothing of this prompt had been read before" in shown.page.inner_text("#meaning") or (
        "had been read before and were reused" in shown.page.inner_text("#meaning")
    )
    shown.page.get_by_role("button", name="New").click()
    shown.drop(silva__md="Eva Silva lives in Osaka.\n", chen__md="Max Chen lives in Hanoi.\n")
    choose_policy(shown, "legolink", tokens="2")
    shown.ask("Where does Max Chen live, and Eva Silva?")  # nothing of it is in any other test
    cached, recomputed, fresh = usage(shown)
    sentence = shown.page.inner_text("#meaning")
    assert sentence.startswith(
        f"Of this prompt's {cached + recomputed + fresh} tokens, {cached} had been read before"
        f" and were reused, {recomputed} more were computed again so that they fit in here,"
        f" and {fresh} are new: "
    )
    assert sentence.endswith("% of the work of reading all of it.")
