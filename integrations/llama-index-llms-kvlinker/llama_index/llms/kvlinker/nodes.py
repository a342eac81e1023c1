"""Nodes of LlamaIndex as chunks of kvlinker: cached ahead of time, and marked when they have been
retrieved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llama_index.core.bridge.pydantic import Field
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import (
    BaseNode,
    MetadataMode,
    NodeWithScore,
    QueryBundle,
    TextNode,
    TransformComponent,
)
from llama_index.llms.kvlinker.content import element
from llama_index.llms.kvlinker.server import default_key, default_url, post

CONTEXT_CACHE = "context_cache"
"""The key of a node's metadata that has the id of its context cache."""

MOST_CHARACTERS = 2**15
"""The most characters that one request caches, but for a longer text alone: it is answered before
the client has waited too long, and sends it again."""

MOST_PAIRS = 16
LONGEST_KEY = 64
LONGEST_VALUE = 512


class ContextCachePostprocessor(BaseNodePostprocessor):
    """Makes chunks of the nodes that were retrieved, for the model that ``KVLinker`` is.

    Nodes that have a context cache are linked by its id; the texts of others are marked, and found
    by what they say, or cached on the way. The nodes' own texts stay as they are: only what the
    model is shown of them changes.
    """

    @classmethod
    def class_name(cls) -> str:
        """Return the name by which the class is stored."""
        return "ContextCachePostprocessor"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        return [NodeWithScore(node=_as_chunk(entry.node), score=entry.score) for entry in nodes]


class ContextCacheTransform(TransformComponent):
    """Caches each node's text as one chunk, as a step of an ``IngestionPipeline`` behind a
    splitter.

    The node has the id of its context cache in its metadata afterwards, unless it has no text.
    Pairs of metadata that are text or numbers, and short enough, are kept with the context cache,
    so that ``KVLinkerRetriever`` can filter by them.
    """

    api_base: str = Field(
        default_factory=default_url, description="The server's address, with /v1."
    )
    api_key: str = Field(
        default_factory=default_key, description="The API key; servers without keys take any."
    )
    ttl: float | None = Field(
        default=None, description="Seconds to live; None for as long as it is not deleted."
    )

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Cache the nodes' texts, and return the nodes with the ids. Many nodes are several
        requests: where one fails, the context caches of those before stay."""
        texts = [node.get_content(MetadataMode.NONE) for node in nodes]
        for places in batches(texts):
            body = {
                "chunks": [texts[place] for place in places],
                "metadata": [kept_metadata(nodes[place].metadata) for place in places],
                "ttl": self.ttl,
            }
            created = post(self.api_base, self.api_key, "context_caches", body)["data"]
            for place, cache in zip(places, created, strict=True):
                name_context_cache(nodes[place], cache["id"])
        return nodes


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


def name_context_cache(node: BaseNode, cache_id: str) -> None:
    """Enter the id of a node's context cache into its metadata, where no embedding sees it."""
    node.metadata[CONTEXT_CACHE] = cache_id
    node.excluded_embed_metadata_keys = [*node.excluded_embed_metadata_keys, CONTEXT_CACHE]


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


def _as_chunk(node: BaseNode) -> BaseNode:
    """Return a copy of a node that a model is shown as a chunk, behind the metadata that it is to
    see.

    A node's template counts only where there is metadata to be seen: without any, that is the id,
    or its absence.
    """
    if not isinstance(node, TextNode):
        return node
    chunk = element("{content}", node.metadata.get(CONTEXT_CACHE))
    shown = node.metadata.keys() - {CONTEXT_CACHE, *node.excluded_llm_metadata_keys}
    hidden = [key for key in node.excluded_llm_metadata_keys if key != CONTEXT_CACHE]
    return node.model_copy(
        update={
            "metadata": {CONTEXT_CACHE: "", **node.metadata},
            "excluded_llm_metadata_keys": [*hidden, CONTEXT_CACHE] if shown else hidden,
            "text_template": f"{{metadata_str}}\n\n{chunk}" if shown else chunk,
        }
    )
