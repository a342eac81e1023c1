"""A retriever over what a server has cached, by words of the texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from pydantic import Field, SecretStr

from langchain_kvlinker.documents import CONTEXT_CACHE
from langchain_kvlinker.server import Server, default_key, default_url


class KVLinkerRetriever(BaseRetriever):
    """Finds cached chunks, of documents that were ingested by ``kvlinker ingest`` or
    ``ContextCacheTransformer``.

    Each document has its context cache's id in its metadata, by which ``context_blocks`` puts it
    into a message, and the ``score`` of the search.
    """

    base_url: str = Field(default_factory=default_url)
    api_key: SecretStr = Field(default_factory=default_key)

    k: int = 4
    """The most documents that are returned."""

    filter: Mapping[str, str] = {}
    """Pairs of metadata that a context cache must have, all of them."""

    scope: str = "private"
    """``private`` for one's own context caches, ``shared`` for those of all tenants."""

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, k: int | None = None
    ) -> list[Document]:
        body: dict[str, Any] = {
            "query": query,
            "limit": self.k if k is None else k,
            "metadata": dict(self.filter),
            "scope": self.scope,
        }
        hits = Server(base_url=self.base_url, api_key=self.api_key).post(
            "/context_caches/search", body
        )
        return [
            Document(
                id=hit["id"],
                page_content=hit["text"],
                metadata={**hit["metadata"], CONTEXT_CACHE: hit["id"], "score": hit["score"]},
            )
            for hit in hits
        ]
