"""Models that people use go the whole way: files, self-test, chat template, chunks, tools and
reasoning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvlinker.base.types.answers import AnswerParts
from kvlinker.base.types.messages import TemplateOptions
from kvlinker.llm import LLM
from tests.doors.http.serving import serving, tiny_settings
from tests.field_models import FIELD_MODELS, FieldModel

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Varna"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
QUESTION: Any = [{"role": "user", "content": "What is the weather?"}]


@pytest.mark.whole
@pytest.mark.parametrize("model", FIELD_MODELS.values(), ids=FIELD_MODELS)
def test_a_model_of_the_field(model: FieldModel, tmp_path: Path) -> None:
    model.save(tmp_path / "model")
    settings = tiny_settings(
        tmp_path / "state",
        model=str(tmp_path / "model"),
        chat_template=None,
        dtype="float32",
        max_model_len=1024,
    )
    with LLM.from_settings(settings) as llm, serving(llm, settings, closes=False) as served:
        _links_chunks(llm)
        _calls_tools(llm, served)
        _reasons(llm, model)


def _links_chunks(llm: LLM) -> None:
    """Chunks are linked in any order, and under ``full`` the answer is that of plain text."""
    one, two = llm.generate_context_cache(["The cat sat on the mat. ", "numbers 1 2 3 "])
    greedy: dict[str, Any] = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
    linked: Any = [{"role": "user", "content": [two, one, "Where is the cat?"]}]
    answer = llm.chat_completion(linked, policy="legolink-2", **greedy)
    assert answer.usage.recomputed_tokens > 0
    assert answer.usage.cached_tokens > 0
    explained = llm.explain(linked, policy="full")
    assert explained.cost.flops == explained.cost.full_flops


def _calls_tools(llm: LLM, served: Any) -> None:
    """The prompt shows the tool, a call that is required is valid, and a marked definition is a
    chunk."""
    prompt = llm.chat_prompt(QUESTION, options=TemplateOptions(tools=(WEATHER,)))
    assert "get_weather" in llm.text_of(prompt)
    body = {
        "messages": QUESTION,
        "tools": [WEATHER],
        "tool_choice": "required",
        "max_tokens": 200,
        "seed": 1,
    }
    answer = served.post("/v1/chat/completions", body | {"parallel_tool_calls": False}).json()
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["city"] in ("Oslo", "Varna")
    marked = WEATHER | {"cache_control": {"type": "ephemeral"}}
    linked = llm.chat_completion(QUESTION, tools=[marked], max_tokens=1)
    assert "get_weather" in llm.read_cache(linked.context_caches[0].id).text


def _reasons(llm: LLM, model: FieldModel) -> None:
    """Reasoning is told apart where the chat template has it, and can be turned off by the
    template's own variable."""
    if not model.reasons:
        assert llm.answer_form.reasoning is None
        return
    tail = llm.tail_of(llm.chat_prompt(QUESTION))
    reader = llm.answer_form.reader(tail, ())
    pieces = [*reader.feed("<think>\nWhere?\n</think>\n\nOslo."), *reader.finish(cut=False)]
    said = AnswerParts.of(pieces)
    assert (said.reasoning, said.content) == ("Where?", "Oslo.")
    silent = TemplateOptions(variables={"enable_thinking": False})
    assert "</think>" in llm.tail_of(llm.chat_prompt(QUESTION, options=silent))
