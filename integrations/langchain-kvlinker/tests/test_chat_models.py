"""The chat model sends what kvlinker takes beside OpenAI's API, and tells what it gives."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from integrations.sample_facts import FACTS, QUESTION
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage

from langchain_kvlinker import (
    ChatKVLinker,
    ContextCacheTransformer,
    KVLinkerRetriever,
    context_blocks,
)


@pytest.fixture
def model(base_url: str) -> ChatKVLinker:
    return ChatKVLinker(temperature=0, max_tokens=8)


def asked(*content: Any) -> list[HumanMessage]:
    return [HumanMessage([*content, {"type": "text", "text": QUESTION}])]


def test_documents_are_linked_by_their_ids(model: ChatKVLinker, facts: tuple[str, ...]) -> None:
    found = KVLinkerRetriever(k=2, filter={"source": "facts"}).invoke("Where does Tom Reyes live?")
    assert found[0].page_content == FACTS[1]
    assert {document.id for document in found} <= set(facts)
    answer = model.invoke(asked(*context_blocks(found)), policy="legolink-2")
    assert answer.text == "Oslo"
    assert answer.response_metadata["link"]["policy"] == "legolink-2"
    assert [cache["id"] for cache in answer.response_metadata["link"]["context_caches"]] == [
        one.id for one in found
    ]
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["input_token_details"]["cache_read"] > 0


def test_streams_tell_the_same(model: ChatKVLinker, facts: tuple[str, ...]) -> None:
    blocks = [{"type": "context_cache", "id": cache} for cache in facts]
    chunks = list(model.stream(asked(*blocks)))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert whole.text == "Oslo"
    assert len(whole.response_metadata["link"]["context_caches"]) == 3
    assert (
        whole.usage_metadata["output_tokens"]
        == model.invoke(asked(*blocks)).usage_metadata["output_tokens"]
    )


def test_documents_are_cached_ahead(model: ChatKVLinker, base_url: str) -> None:
    documents = [
        Document(fact, metadata={"number": number, "parts": [1]})
        for number, fact in enumerate(FACTS)
    ]
    cached = ContextCacheTransformer(ttl=600).transform_documents(documents)
    assert [document.metadata["parts"] for document in cached] == [[1]] * 3
    blocks = [block for block in context_blocks(cached) if isinstance(block, dict)]
    assert [block["context_cache"] for block in blocks] == [
        each.metadata["context_cache"] for each in cached
    ]
    assert (
        KVLinkerRetriever(filter={"number": "1"}).invoke("Tom")[0].id
        == cached[1].metadata["context_cache"]
    )
    assert ContextCacheTransformer().transform_documents([]) == []
    assert model.invoke(asked(*context_blocks(cached))).text == "Oslo"


def test_many_documents_are_cached_by_several_requests_and_blank_ones_stay(
    model: ChatKVLinker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("langchain_kvlinker.documents.MOST_CHARACTERS", len(FACTS[0]))
    texts = ["", FACTS[0], " \n", *FACTS[1:]]
    cached = ContextCacheTransformer(ttl=600).transform_documents(list(map(Document, texts)))
    assert [document.page_content for document in cached] == texts
    ids = [document.metadata.get("context_cache") for document in cached]
    assert [id is None for id in ids] == [True, False, True, *[False] * len(FACTS[1:])]
    assert len(set(ids)) == len(FACTS) + 1


def test_documents_without_ids_are_marked(model: ChatKVLinker) -> None:
    documents = [Document(fact) for fact in FACTS]
    for sent in (
        model.invoke(asked(*context_blocks(documents))),
        model.invoke(asked(), documents=documents),
    ):
        assert sent.text == "Oslo"
        assert len(sent.response_metadata["link"]["context_caches"]) == 3


def test_results_of_tools_may_have_chunks(model: ChatKVLinker, facts: tuple[str, ...]) -> None:
    call = {"name": "find", "args": {}, "id": "call-1", "type": "tool_call"}
    for block in (
        {"type": "context_cache", "id": facts[1]},
        context_blocks([Document(FACTS[1])])[0],
    ):
        messages = [
            HumanMessage(QUESTION),
            AIMessage("", tool_calls=[call]),
            ToolMessage([block], tool_call_id="call-1"),
        ]
        answer = model.invoke(messages)
        assert len(answer.response_metadata["link"]["context_caches"]) == 1


def test_reasoning_is_sent_back(model: ChatKVLinker) -> None:
    thought = AIMessage("Oslo.", additional_kwargs={"reasoning_content": "Where?"}, name="clerk")
    sent = model._get_request_payload([HumanMessage("Hello", name="Tom"), thought])["messages"]
    assert sent[1] == {
        "role": "assistant",
        "content": "Oslo.",
        "reasoning_content": "Where?",
        "name": "clerk",
    }
    assert sent[0]["name"] == "Tom"


def test_reasoning_is_told_apart(model: ChatKVLinker) -> None:
    message = {"role": "assistant", "content": "Oslo.", "reasoning_content": "Where?"}
    told = {
        "choices": [{"message": message, "finish_reason": "stop"}],
        "usage": None,
        "model": "reader",
    }
    (generation,) = model._create_chat_result(told).generations
    assert [block["type"] for block in generation.message.content_blocks] == ["reasoning", "text"]
    event = {"choices": [{"delta": {"reasoning_content": "Where?"}, "finish_reason": None}]}
    chunk = model._convert_chunk_to_generation_chunk(event, AIMessageChunk, None)
    assert chunk is not None
    assert chunk.message.additional_kwargs == {"reasoning_content": "Where?"}


def test_options_are_those_of_the_call_before_the_models(base_url: str) -> None:
    model = ChatKVLinker(policy="naive", implicit="off", extra_body={"top_k": 1})
    assert model._get_request_payload("Hello", policy="full")["extra_body"] == {
        "top_k": 1,
        "link": {"policy": "full", "implicit": "off"},
    }
    body = {"link": {"policy": "legolink-2"}}
    assert model._get_request_payload("Hello", extra_body=body)["extra_body"] == {
        "link": {"policy": "legolink-2", "implicit": "off"}
    }
    asked_for = model._get_request_payload("Hello", extra_body=body, policy="full")
    assert asked_for["extra_body"]["link"]["policy"] == "full"
    with pytest.raises(openai.BadRequestError, match="nope"):
        model.invoke("Hello", policy="nope")


@pytest.mark.parametrize(
    "options",
    [{"use_responses_api": True}, {"reasoning": {"effort": "low"}}],
    ids=lambda options: next(iter(options)),
)
def test_the_responses_api_is_refused(base_url: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="would drop chunks"):
        ChatKVLinker(**options).invoke("Hi")


def test_tokens_are_counted_by_the_server(model: ChatKVLinker, facts: tuple[str, ...]) -> None:
    assert model.get_num_tokens("Where does Tom Reyes live?") == len(
        model.get_token_ids("Where does Tom Reyes live?")
    )
    messages = asked({"type": "context_cache", "id": facts[0]})
    assert (
        model.get_num_tokens_from_messages(messages)
        == model.invoke(messages).usage_metadata["input_tokens"]
    )

    def find(query: str) -> str:
        """Find notes."""
        return query

    told = (
        model.bind_tools([find], tool_choice="none").invoke(messages).usage_metadata["input_tokens"]
    )
    counted = model.get_num_tokens_from_messages(messages, tools=[find])
    assert counted > told == model.get_num_tokens_from_messages(messages)


def test_answers_are_enforced(model: ChatKVLinker) -> None:
    schema = {
        "title": "place",
        "type": "object",
        "properties": {"city": {"enum": ["Lisbon", "Oslo", "Varna"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    form = ChatKVLinker(temperature=0).with_structured_output(schema)
    assert form.invoke("".join(FACTS) + QUESTION) == {"city": "Oslo"}
    assert (
        json.dumps(form.invoke("".join(FACTS) + "Question: Where does Mira Holt live?"))
        == '{"city": "Varna"}'
    )
