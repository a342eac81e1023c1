"""Documents of LangChain as chunks of kvlinker: cached ahead of time, and put into messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from langchain_core.documents import BaseDocumentTransformer, Document

from langchain_kvlinker.server import Server

CONTEXT_CACHE = "context_cache"
"""The key of a document's metadata, and of a block of text, that has the id of its context
cache."""

MOST_CHARACTERS = 2**15
"""The most characters that one request caches, but for a longer text alone: it is answered before
the client has waited too long, and sends it again."""

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

    Split long documents first: a chunk is read as a whole. Those without text, as of a blank page,
    stay as they are. Pairs of metadata that are text or numbers, and short enough, are kept with
    the context cache, so that ``KVLinkerRetriever`` can filter by them.
    """

    ttl: float | None = None
    """Seconds to live; None for as long as it is not deleted."""

    def transform_documents(
        self, documents: Sequence[Document], **kwargs: Any
    ) -> Sequence[Document]:
        """Cache the documents, and return them with the ids. ``kwargs`` are other fields of ``POST
        /v1/context_caches``, such as ``pinned``, the same for all. Long lists are several requests:
        where one fails, the context caches of those before stay."""
        cached = list(documents)
        for places in batches([document.page_content for document in documents]):
            body = {
                "chunks": [documents[place].page_content for place in places],
                "metadata": [kept_metadata(documents[place].metadata) for place in places],
                "ttl": self.ttl,
                **kwargs,
            }
            for place, cache in zip(places, self.post("/context_caches", body), strict=True):
                metadata = {**documents[place].metadata, CONTEXT_CACHE: cache["id"]}
                cached[place] = documents[place].model_copy(update={"metadata": metadata})
        return cached


def batches(texts: Sequence[str]) -> Iterator[list[int]]:
    """Yield the places of the texts that one request caches, those that are blank left out."""
    batch: list[int] = []
    characters = 0
    for place, text in enumerate(texts):
        if not text.strip():
            continue
        if batch and characters + len(text) > MOST_CHARACTERS:
            yield batch
            batch, characters = [], 0
        batch.append(place)
        characters += len(text)
    if batch:
        yield batch


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
