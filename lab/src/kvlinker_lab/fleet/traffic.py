"""Traffic of a fleet: prompts of chunks, some of which are far more popular than others."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

TOPIC = 16
"""The chunks of one document."""

CHUNKS = 8
"""The chunks of a prompt: six of one document, and two that prompts of all documents share."""

ORDERS = ("retrieved", "ordered")
"""Any six chunks of a document in any order, the shared ones among them, as a search gives them; or
always its first six in the same order, and the shared ones behind."""


def prompts(
    corpus: int, count: int, seed: int, *, order: str = "retrieved"
) -> Iterator[tuple[int, ...]]:
    """Yield prompts of chunks 0 to ``corpus`` - 1; documents are as popular as Zipf's law says."""
    random = np.random.default_rng(seed)
    topics = corpus // TOPIC
    weights = np.cumsum(1 / np.arange(1, topics + 1))
    documents = np.searchsorted(weights / weights[-1], random.random(count))
    common = np.searchsorted(weights / weights[-1], random.random((count, 2)))
    for document, others in zip(documents.tolist(), common.tolist(), strict=True):
        own = np.arange(TOPIC) if order == "ordered" else random.permutation(TOPIC)
        chosen = (document * TOPIC + own[: CHUNKS - 2]).tolist()
        prompt = list(dict.fromkeys([*chosen, *(other * TOPIC for other in others)]))
        if order != "ordered":
            random.shuffle(prompt)
        yield tuple(prompt)
