"""Documents of LangChain as chunks of kvlinker: cached ahead of time, and put into messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.documents import BaseDocumentTransformer, Document

from langchain_kvlinker.server import Server

CONTEXT_CACHE = "context_cache"
"""The key of a document's metadata, and of a block of text, that has the id of its context
cache."""

MOST_PAIRS = 16
LONGEST_KEY = 64
LONGEST_VALUE = 512


def context_blocks(documents: Sequence[Document]) -> list[str | dict[Any, Any]]:
    """Return documents as blocks of text, in order: those that have a context cache with its id,
    others marked to be chunks.

    Tools of agents may return them: LangChain makes JSON text of blocks of types that it does not
    know.
    """
    return [_block(document) for document in documents]


def _block(document: Document) -> dict[Any, Any]:
    text = {"type": "text", "text": document.page_content}
    if cache := document.metadata.get(CONTEXT_CACHE):
        return {**text, CONTEXT_CACHE: cache}
    return {**text, "prompt_cache_breakpoint": {"mode": "explicit"}}


def sent_content(content: Any) -> Any:
    """Return message content as the server takes it: blocks of text that have a context cache by
    its id alone."""
    return [_sent_block(block) for block in content] if isinstance(content, list) else content


def _sent_block(block: Any) -> Any:
    cache = block.get(CONTEXT_CACHE) if isinstance(block, Mapping) else None
    return block if cache is None else {"type": CONTEXT_CACHE, "id": cache}


class ContextCacheTransformer(Server, BaseDocumentTransformer):
    """Caches each document as one chunk, and returns it with the id of its context cache in its
    metadata.

    Split long documents first: a chunk is read as a whole. Pairs of metadata that are text or
    numbers, and short enough, are kept with the context cache, so that ``KVLinkerRetriever`` can
    filter by them.
    """

    ttl: float | None = None
    """Seconds to live; None for as long as it is not deleted."""

    def transform_documents(
        self, documents: Sequence[Document], **kwargs: Any
    ) -> Sequence[Document]:
        """Cache the documents, and return them with the ids. ``kwargs`` are other fields of ``POST
        /v1/context_caches``, such as ``pinned``."""
        if not documents:
            return []
        body = {
            "chunks": [document.page_content for document in documents],
            "metadata": [kept_metadata(document.metadata) for document in documents],
            "ttl": self.ttl,
            **kwargs,
        }
        return [
            document.model_copy(
                update={"metadata": {**document.metadata, CONTEXT_CACHE: cache["id"]}}
            )
            for document, cache in zip(documents, self.post("/context_caches", body), strict=True)
        ]


def kept_metadata(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the pairs that a context cache can have: the first sixteen that are text or numbers,
    and short."""
    pairs = {
        key: str(value)
        for key, value in metadata.items()
        if isinstance(value, str | int | float)
        and len(key) <= LONGEST_KEY
        and len(str(value)) <= LONGEST_VALUE
    }
    return dict(list(pairs.items())[:MOST_PAIRS])
