"""A retriever over what a server has cached, by words of the texts."""

from __future__ import annotations

from collections.abc import Mapping

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.llms.kvlinker.nodes import name_context_cache
from llama_index.llms.kvlinker.server import default_key, default_url, post


class KVLinkerRetriever(BaseRetriever):
    """Finds cached chunks, of documents that were ingested by ``kvlinker ingest`` or
    ``ContextCacheTransform``.

    ``similarity_top_k``: the most nodes that are returned. ``filters``: pairs of metadata that a
    context cache must have, all of them. ``scope``: ``private`` for one's own context caches,
    ``shared`` for those of all tenants.
    """

    def __init__(
        self,
        *,
        similarity_top_k: int = 4,
        filters: Mapping[str, str] | None = None,
        scope: str = "private",
        api_base: str | None = None,
        api_key: str | None = None,
    ) -> None:
        self._body = {"limit": similarity_top_k, "metadata": dict(filters or {}), "scope": scope}
        self._api_base = api_base or default_url()
        self._api_key = api_key or default_key()
        super().__init__()

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        body = {"query": query_bundle.query_str, **self._body}
        hits = post(self._api_base, self._api_key, "context_caches/search", body)["data"]
        found = []
        for hit in hits:
            node = TextNode(id_=hit["id"], text=hit["text"], metadata=dict(hit["metadata"]))
            node.excluded_llm_metadata_keys = list(hit["metadata"])
            name_context_cache(node, hit["id"])
            found.append(NodeWithScore(node=node, score=hit["score"]))
        return found
