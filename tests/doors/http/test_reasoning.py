"""Wishes about reasoning and brevity do what the chat template can, and the rest of them is
told."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import product
from typing import Any

import pytest

from kvlinker.llm import LLM
from tests.doors.http.fake_engine import FakeEngine
from tests.doors.http.serving import TEMPLATE, Served, serving, tiny_model, tiny_settings

HEADER = "X-Ignored-Fields"
CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
QUESTION: Any = [{"role": "user", "content": "Hi"}]

TEMPLATES = {
    "never": TEMPLATE,
    "always": TEMPLATE + "<think>",
    "switch": TEMPLATE + "{% if enable_thinking %}on{% else %}off{% endif %}<think>",
    "effort": TEMPLATE + "effort {{ reasoning_effort | default('its own') }}",
}
"""Chat templates by what they can do about reasoning."""

Ask = Callable[..., tuple[str, str | None]]


@pytest.fixture(scope="module")
def servers(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, tuple[Served, FakeEngine]]]:
    """A server for each template, with its engine."""
    with ExitStack() as stack:

        def started(template: str) -> tuple[Served, FakeEngine]:
            engine = FakeEngine()
            engine.script = ["Hello."]
            settings = tiny_settings(tmp_path_factory.mktemp("state"), chat_template=template)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("kvlinker.service.startup.EmbeddedEngine", lambda *_, **__: engine)
                llm = LLM.from_model(tiny_model(), settings)
            return stack.enter_context(serving(llm, settings)), engine

        yield {name: started(template) for name, template in TEMPLATES.items()}


@pytest.fixture
def ask(servers: dict[str, tuple[Served, FakeEngine]]) -> Ask:
    """Ask a model with one of the templates; returns the end of the prompt, and the fields that are
    ignored."""
    bodies: dict[str, Any] = {
        CHAT: {"messages": QUESTION},
        MESSAGES: {"messages": QUESTION, "max_tokens": 2},
        RESPONSES: {"input": "Hi"},
    }

    def asked(template: str, path: str = CHAT, **fields: Any) -> tuple[str, str | None]:
        running, engine = servers[template]
        answer = running.post(path, bodies[path] | fields)
        assert answer.status_code == 200, answer.text
        prompt = running.llm.text_of(engine.requests[-1].prompt)
        return prompt.rpartition("assistant\n")[2], answer.headers.get(HEADER)

    return asked


EFFORTS = [
    ("never", "none", "", None),
    ("never", "low", "", "reasoning_effort"),
    ("always", "none", "<think>", "reasoning_effort"),
    ("always", "high", "<think>", "reasoning_effort"),
    ("switch", None, "off<think>", None),
    ("switch", "none", "off<think>", None),
    ("switch", "minimal", "on<think>", None),
    ("effort", None, "effort its own", None),
    ("effort", "xhigh", "effort xhigh", None),
]


def test_an_effort_does_what_the_template_can(ask: Ask, subtests: pytest.Subtests) -> None:
    for template, effort, shown, ignored in EFFORTS:
        with subtests.test(f"{template} {effort}"):
            assert ask(template, reasoning_effort=effort) == (shown, ignored)


def test_a_variable_of_the_template_counts_before_the_effort(ask: Ask) -> None:
    assert ask(
        "effort", reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "9"}
    ) == ("effort 9", None)


WITHOUT_EFFECT: list[tuple[str, dict[str, Any], str | None]] = [
    (
        CHAT,
        {"reasoning": {"effort": "low"}, "reasoning_effort": "low"},
        "reasoning.effort, reasoning_effort",
    ),
    (CHAT, {"reasoning": {}, "verbosity": "medium"}, None),
    (CHAT, {"verbosity": "low", "stream": True}, "verbosity"),
    (CHAT, {"reasoning": {"max_tokens": 9}}, "reasoning.max_tokens"),
    (
        RESPONSES,
        {"reasoning": {"effort": "low", "summary": "auto"}},
        "reasoning.effort, reasoning.summary",
    ),
    (RESPONSES, {"text": {"verbosity": "low"}, "stream": True}, "text.verbosity"),
    (
        MESSAGES,
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        "thinking.budget_tokens",
    ),
    (MESSAGES, {"thinking": {"type": "disabled"}}, None),
    (MESSAGES, {"thinking": {"type": "adaptive"}}, None),
    (MESSAGES, {"output_config": {"effort": "high"}, "stream": True}, "output_config.effort"),
]


def test_what_has_no_effect_is_told_in_the_words_of_the_route(
    ask: Ask, subtests: pytest.Subtests
) -> None:
    for path, fields, ignored in WITHOUT_EFFECT:
        with subtests.test(path, fields=fields):
            assert ask("never", path, **fields) == ("", ignored)


def test_of_two_efforts_one_counts(ask: Ask) -> None:
    told = ask("switch", reasoning={"effort": "none"}, reasoning_effort="high")
    assert told == ("off<think>", "reasoning_effort")
    told = ask("switch", MESSAGES, thinking={"type": "disabled"}, output_config={"effort": "high"})
    assert told == ("off<think>", "output_config.effort")


def test_an_effort_that_is_no_word_is_refused(
    servers: dict[str, tuple[Served, FakeEngine]],
) -> None:
    for field in ("reasoning_effort", "verbosity"):
        answer = servers["never"][0].post(CHAT, {"messages": QUESTION, field: 3})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


def test_responses_repeat_what_was_asked(servers: dict[str, tuple[Served, FakeEngine]]) -> None:
    answer = (
        servers["never"][0].post(RESPONSES, {"input": "Hi", "reasoning": {"effort": "low"}}).json()
    )
    assert answer["reasoning"] == {"effort": "low", "summary": None}


THINKING = (
    TEMPLATE.replace("<|start|>", "<|im_start|>")
    + "{% if enable_thinking is defined and not enable_thinking %}briefly{% endif %}<think>\n"
    + "{# <tool_call> #}"
)


@pytest.fixture(scope="module")
def thinking(llm_with: Callable[[str], LLM]) -> Iterator[Served]:
    """A server on a real engine, whose model begins each answer with reasoning."""
    llm = llm_with(THINKING)
    with serving(llm, llm.settings, closes=False) as running:
        yield running


LIMITS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"reasoning": {"max_tokens": 5}}),
    (CHAT, {"thinking_token_budget": 5}),
    (CHAT, {"thinking": {"type": "enabled", "budget_tokens": 5}}),
    (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 5}}),
    (RESPONSES, {"reasoning": {"max_tokens": 5}}),
]
LONGEST_TOKEN = 12
"""The characters of the tokenizer's longest token, and more."""


def test_limits_of_reasoning_are_kept(thinking: Served, subtests: pytest.Subtests) -> None:
    for (path, fields), stream in product(LIMITS, (False, True)):
        with subtests.test(path, fields=fields, stream=stream):
            (cat,) = thinking.llm.token_ids(" cat")
            close = thinking.llm.tokenizer.convert_tokens_to_ids("</think>")
            body = {
                "input" if path == RESPONSES else "messages": QUESTION,
                "allowed_token_ids": [cat, close],
                "logit_bias": {str(close): -100},  # it would not end by itself
                "max_output_tokens" if path == RESPONSES else "max_tokens": 12,
                "stream": stream,
            }
            if path == MESSAGES:  # which knows of no such tokens
                body = {name: body[name] for name in ("messages", "max_tokens", "stream")}
            answer = thinking.post(path, body | fields)
            assert answer.status_code == 200, answer.text
            assert HEADER not in answer.headers
            thought, said = told(path, answer.text) if stream else parts(path, answer.json())
            if path == MESSAGES:
                assert len(thought) <= 5 * LONGEST_TOKEN
            else:
                assert (thought, said) == (("cat" + " cat" * 4), "cat" + " cat" * 5)


def parts(path: str, answer: dict[str, Any]) -> tuple[str, str]:
    """Reasoning and text of a whole answer."""
    if path == CHAT:
        message = answer["choices"][0]["message"]
        assert message["reasoning"] == message["reasoning_content"]
        assert "tool_calls" not in message
        return message["reasoning_content"] or "", message["content"]
    blocks = answer["content"] if path == MESSAGES else answer["output"]
    texts = [
        block.get("thinking") or block.get("text") or block["content"][0]["text"]
        for block in blocks
    ]
    return "".join(texts[:-1]), texts[-1]


def told(path: str, events: str) -> tuple[str, str]:
    """Reasoning and text of a stream."""
    thought = said = ""
    for line in events.splitlines():
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            deltas = (
                [choice["delta"] for choice in event.get("choices", ())] or [event["delta"]]
                if "choices" in event or isinstance(event.get("delta"), dict)
                else []
            )
            for delta in deltas:
                assert delta.get("reasoning") == delta.get("reasoning_content")
                thought += delta.get("reasoning_content") or delta.get("thinking") or ""
                said += delta.get("content") or delta.get("text") or ""
            if event.get("type") == "response.reasoning_text.delta":
                thought += event["delta"]
            if event.get("type") == "response.output_text.delta":
                said += event["delta"]
    return thought, said


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"include_reasoning": False}),
        (RESPONSES, {"include_reasoning": False}),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 5, "display": "omitted"}}),
    ],
)
def test_reasoning_is_left_out_where_it_is_not_wanted(
    thinking: Served, path: str, fields: dict[str, Any]
) -> None:
    limits = {} if path == MESSAGES else {"reasoning": {"max_tokens": 5}}
    length = {"max_output_tokens" if path == RESPONSES else "max_tokens": 20}
    turn = {"input" if path == RESPONSES else "messages": QUESTION}
    answer = thinking.post(path, {**turn, **limits, **length, **fields}).json()
    assert parts(path, answer)[0] == ""
    assert parts(path, answer)[1]
    if path == RESPONSES:
        assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


@pytest.mark.parametrize(
    ("path", "off"),
    [
        (CHAT, {"reasoning_effort": "none"}),
        (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}),
        (MESSAGES, {"thinking": {"type": "disabled"}}),
        (RESPONSES, {"reasoning": {"effort": "none"}}),
    ],
)
def test_reasoning_is_turned_off_in_the_prompt(
    thinking: Served, path: str, off: dict[str, Any]
) -> None:
    turn = {"input" if path == RESPONSES else "messages": QUESTION}
    turn["max_output_tokens" if path == RESPONSES else "max_tokens"] = 1

    def length(**fields: Any) -> int:
        usage = thinking.post(path, turn | fields).json()["usage"]
        found: int = usage.get("prompt_tokens") or usage["input_tokens"]
        return found

    assert length(**off) - length() == len(thinking.llm.token_ids("briefly"))
