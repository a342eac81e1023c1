"""A Haystack pipeline with its own generator for OpenAI's API: documents go beside the messages,
and each is a chunk.

Run a server (`make serve`), then `python integrations/examples/haystack_pipeline.py`. It needs `pip
install haystack-ai`.
"""

from __future__ import annotations

import os
from typing import Any

from haystack import Document, Pipeline, component
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.components.retrievers.in_memory import InMemoryBM25Retriever
from haystack.dataclasses import ChatMessage
from haystack.document_stores.in_memory import InMemoryDocumentStore
from haystack.utils import Secret

URL = os.environ.get("KVLINKER_BASE_URL", "http://localhost:8000/v1")
FACTS = [
    "Mira Holt lives in Varna. She works as a baker.",
    "Tom Reyes lives in Oslo. He works as a pilot.",
]


@component
class DocumentsAsChunks:
    """Sends documents beside the messages, where kvlinker finds or caches each of them."""

    @component.output_types(generation_kwargs=dict[str, Any])
    def run(self, documents: list[Document]) -> dict[str, Any]:
        return {
            "generation_kwargs": {
                "extra_body": {"documents": [{"text": one.content} for one in documents]}
            }
        }


def main() -> None:
    store = InMemoryDocumentStore()
    store.write_documents([Document(content=fact) for fact in FACTS])
    pipeline = Pipeline()
    pipeline.add_component("retriever", InMemoryBM25Retriever(store))
    pipeline.add_component("chunks", DocumentsAsChunks())
    generator = OpenAIChatGenerator(
        api_key=Secret.from_token("none"),
        model="default",
        api_base_url=URL,
        generation_kwargs={"temperature": 0, "max_tokens": 16},
    )
    pipeline.add_component("generator", generator)
    pipeline.connect("retriever.documents", "chunks.documents")
    pipeline.connect("chunks.generation_kwargs", "generator.generation_kwargs")
    for question in ("Where does Tom Reyes live?", "Where does Mira Holt live?"):
        messages = [ChatMessage.from_user(f"Question: {question}")]
        answer = pipeline.run(
            {"retriever": {"query": question}, "generator": {"messages": messages}}
        )
        reply = answer["generator"]["replies"][0]
        details = reply.meta["usage"]["prompt_tokens_details"]
        print(f"{question} {reply.text} ({details['cached_tokens']} tokens cached)")


if __name__ == "__main__":
    main()
