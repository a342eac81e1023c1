"""LlamaIndex's language model sends chunks as chunks, and its query engines answer from what was
ingested."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from integrations.sample_facts import FACTS, QUESTION
from llama_index.core import PromptTemplate
from llama_index.core.base.llms.types import (
    CacheControl,
    CachePoint,
    ChatMessage,
    CitableBlock,
    ImageBlock,
    MessageRole,
    TextBlock,
    ToolCallBlock,
)
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import Document, MetadataMode, NodeWithScore, TextNode
from llama_index.core.tools import FunctionTool
from llama_index.llms.kvlinker import (
    ContextCachePostprocessor,
    ContextCacheTransform,
    KVLinker,
    KVLinkerRetriever,
    context_cache,
)
from llama_index.llms.kvlinker.content import body_messages, element, without_chunks
from pydantic import BaseModel

TEMPLATE = PromptTemplate("{context_str}\n\nQuestion: {query_str}")


@pytest.fixture
def model(address: str) -> KVLinker:
    return KVLinker(temperature=0, max_tokens=8)


def linked(answer: Any) -> list[dict[str, Any]]:
    """Return what the server tells of the context caches in an answer's prompt."""
    caches: list[dict[str, Any]] = answer.raw.link["context_caches"]
    return caches


def asked(*blocks: Any) -> list[ChatMessage]:
    return [ChatMessage(role="user", blocks=[*blocks, TextBlock(text=QUESTION)])]


def test_context_caches_in_messages(model: KVLinker, facts: tuple[str, ...]) -> None:
    messages = asked(*map(context_cache, facts))
    answer = model.chat(messages)
    assert answer.message.content == "Oslo"
    assert [cache["id"] for cache in linked(answer)] == list(facts)
    assert "".join(event.delta or "" for event in model.stream_chat(messages)) == "Oslo"


async def test_context_caches_in_completions(model: KVLinker, facts: tuple[str, ...]) -> None:
    prompt = "".join(element("", cache_id) for cache_id in facts) + QUESTION
    answer = model.complete(prompt)
    assert answer.text == "Oslo"
    assert [cache["id"] for cache in linked(answer)] == list(facts)
    assert [*model.stream_complete(prompt)][-1].text == "Oslo"
    assert (await model.acomplete(prompt)).text == "Oslo"
    assert [event async for event in await model.astream_complete(prompt)][-1].text == "Oslo"


async def test_context_caches_in_messages_async(model: KVLinker, facts: tuple[str, ...]) -> None:
    messages = asked(*map(context_cache, facts))
    assert (await model.achat(messages)).message.content == "Oslo"
    assert (
        "".join([event.delta or "" async for event in await model.astream_chat(messages)]) == "Oslo"
    )


def test_blocks_that_mark_chunks(model: KVLinker) -> None:
    point = CachePoint(cache_control=CacheControl(type="ephemeral"))
    citable = CitableBlock(title="Tom", source="notes", content=FACTS[1])
    for blocks in (
        [TextBlock(text=FACTS[1]), point],
        [citable],
        [TextBlock(text=element(FACTS[1]))],
    ):
        answer = model.chat(asked(*blocks))
        assert answer.message.content == "Oslo"
        assert len(linked(answer)) == 1


def test_what_the_server_is_sent(model: KVLinker) -> None:
    marked = {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}
    call = ToolCallBlock(tool_call_id="1", tool_name="find", tool_kwargs={})
    result = ChatMessage(
        role=MessageRole.TOOL, content=element("b"), additional_kwargs={"tool_call_id": "1"}
    )
    cut = ChatMessage(
        role=MessageRole.USER, content=f"a{element('b')}c{element('d', 'cc_1')}</context_cache> e"
    )
    sent = body_messages([ChatMessage(role=MessageRole.ASSISTANT, blocks=[call]), result, cut])
    assert sent[0]["tool_calls"][0]["function"] == {"name": "find", "arguments": "{}"}
    assert sent[1] == {"role": "tool", "content": [marked], "tool_call_id": "1"}
    assert sent[2]["content"] == [
        {"type": "text", "text": "a"},
        marked,
        {"type": "text", "text": "c"},
        {"type": "context_cache", "id": "cc_1"},
        {"type": "text", "text": " e"},
    ]
    assert without_chunks([cut])[0].content == "abcd e"
    with pytest.raises(ValueError, match="ImageBlock"):
        body_messages(
            [
                ChatMessage(
                    blocks=[context_cache("cc_1"), ImageBlock(url="http://localhost/picture.png")]
                )
            ]
        )


def test_nodes_become_chunks() -> None:
    nodes = [
        TextNode(text="a {b}"),
        TextNode(text="c", metadata={"context_cache": "cc_1"}),
        TextNode(text="d", metadata={"context_cache": "cc_2", "title": "D"}),
    ]
    shown = ContextCachePostprocessor().postprocess_nodes(
        [NodeWithScore(node=node, score=1) for node in nodes]
    )
    assert [entry.node.get_content(MetadataMode.LLM) for entry in shown] == [
        "<context_cache>a {b}</context_cache>",
        '<context_cache id="cc_1">c</context_cache>',
        'title: D\n\n<context_cache id="cc_2">d</context_cache>',
    ]
    assert [entry.node.get_content(MetadataMode.NONE) for entry in shown] == ["a {b}", "c", "d"]
    assert nodes[0].get_content(MetadataMode.LLM) == "a {b}"


def test_a_query_engine_answers_from_ingested_documents(model: KVLinker) -> None:
    documents = [Document(text=fact.strip(), metadata={"set": "engine"}) for fact in FACTS]
    nodes = IngestionPipeline(
        transformations=[SentenceSplitter(), ContextCacheTransform(ttl=600)]
    ).run(documents=documents)
    engine = RetrieverQueryEngine.from_args(
        KVLinkerRetriever(similarity_top_k=2, filters={"set": "engine"}),
        llm=model,
        node_postprocessors=[ContextCachePostprocessor()],
        text_qa_template=TEMPLATE,
    )
    answer = engine.query("Where does Tom Reyes live?")
    assert str(answer) == "Oslo"
    assert {source.node.node_id for source in answer.source_nodes} <= {
        node.metadata["context_cache"] for node in nodes
    }
    assert answer.source_nodes[0].node.get_content() == FACTS[1].strip()


def test_many_nodes_are_cached_by_several_requests_and_blank_ones_stay(
    model: KVLinker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llama_index.llms.kvlinker.nodes.MOST_CHARACTERS", len(FACTS[0]))
    nodes = [TextNode(text=text) for text in ("", FACTS[0], " \n", *FACTS[1:])]
    ids = [node.metadata.get("context_cache") for node in ContextCacheTransform(ttl=600)(nodes)]
    assert [id is None for id in ids] == [True, False, True, *[False] * len(FACTS[1:])]
    assert len(set(ids)) == len(FACTS) + 1


def test_options_and_window(model: KVLinker, address: str) -> None:
    assert model.metadata.context_window > 1000
    assert KVLinker(context_window=500).metadata.context_window == 500
    strict = KVLinker(policy="nope", max_retries=0)
    with pytest.raises(openai.BadRequestError, match="nope"):
        strict.chat([ChatMessage(content="Hello")])
    chosen = KVLinker(
        implicit="off", additional_kwargs={"extra_body": {"top_k": 1}}
    )._get_model_kwargs()
    assert chosen["extra_body"] == {"top_k": 1, "link": {"implicit": "off"}}


class Place(BaseModel):
    """A place."""

    city: str


def test_tools_and_forms_are_enforced(address: str) -> None:
    model = KVLinker(temperature=0, max_tokens=100)

    def find(city: str) -> str:
        """Find a city."""
        return city

    answer = model.chat_with_tools(
        [FunctionTool.from_defaults(find)], user_msg=QUESTION, tool_required=True
    )
    (call,) = model.get_tool_calls_from_response(answer)
    assert call.tool_name == "find"
    assert isinstance(call.tool_kwargs["city"], str)
    assert isinstance(model.structured_predict(Place, PromptTemplate(QUESTION)), Place)
