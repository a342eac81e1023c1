"""kvlinker in LangChain: a chat model, documents as chunks, and a retriever over cached chunks."""

from langchain_kvlinker.chat_models import ChatKVLinker
from langchain_kvlinker.documents import ContextCacheTransformer, context_blocks
from langchain_kvlinker.retrievers import KVLinkerRetriever

__all__ = ["ChatKVLinker", "ContextCacheTransformer", "KVLinkerRetriever", "context_blocks"]
