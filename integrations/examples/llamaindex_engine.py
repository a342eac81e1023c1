"""A LlamaIndex query engine: documents are split and cached once, found by their words, and linked
into each prompt.

Run a server (`make serve`), then `python integrations/examples/llamaindex_engine.py "…"`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from llama_index.core import PromptTemplate, SimpleDirectoryReader
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.node_parser import MarkdownNodeParser
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.llms.kvlinker import (
    ContextCachePostprocessor,
    ContextCacheTransform,
    KVLinker,
    KVLinkerRetriever,
)

NOTES = Path(__file__).parents[2] / "examples" / "notes"
TEMPLATE = PromptTemplate("{context_str}\n\nQuestion: {query_str}")


def main(question: str = "Where does Tom Reyes live?") -> None:
    documents = SimpleDirectoryReader(str(NOTES)).load_data()
    IngestionPipeline(transformations=[MarkdownNodeParser(), ContextCacheTransform()]).run(
        documents=documents
    )
    engine = RetrieverQueryEngine.from_args(
        KVLinkerRetriever(similarity_top_k=2),
        llm=KVLinker(temperature=0, max_tokens=16),
        node_postprocessors=[ContextCachePostprocessor()],
        text_qa_template=TEMPLATE,
    )
    answer = engine.query(question)
    print(answer)
    for source in answer.source_nodes:
        print(f"  {source.node.node_id}: {source.node.get_content()[:50]!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
