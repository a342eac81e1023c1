"""kvlinker in LlamaIndex: a language model, nodes as chunks, and a retriever over cached chunks."""

from llama_index.llms.kvlinker.base import KVLinker
from llama_index.llms.kvlinker.content import context_cache
from llama_index.llms.kvlinker.nodes import ContextCachePostprocessor, ContextCacheTransform
from llama_index.llms.kvlinker.retriever import KVLinkerRetriever

__all__ = [
    "ContextCachePostprocessor",
    "ContextCacheTransform",
    "KVLinker",
    "KVLinkerRetriever",
    "context_cache",
]
