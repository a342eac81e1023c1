"""Searches a state directory by words, without a model."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from kvlinker.base.types.texts import SearchHit
from kvlinker.engines.contract.known_models import remembered_fingerprint
from kvlinker.settings import Settings
from kvlinker.store import Catalog, load_cipher


def found_by_words(
    settings: Settings, query: str, *, tenant: str, limit: int, metadata: Mapping[str, str]
) -> tuple[SearchHit, ...] | None:
    """Return what ``LLM.search`` would find by words; None where it takes the model to know: the
    model is new here, search is off or is by meaning, too, or texts are not in the index yet."""
    if settings.engine != "embedded" or settings.embedding_model or not settings.searchable:
        return None
    fingerprint = remembered_fingerprint(settings)
    place = settings.catalog_place
    if fingerprint is None or (isinstance(place, Path) and not place.is_file()):
        return None
    with closing(Catalog(place, load_cipher(settings.encryption_key))) as catalog:
        if catalog.without_text(fingerprint, limit=1):
            return None
        return catalog.search.search(
            query,
            tenant=tenant,
            fingerprint=fingerprint,
            now=time.time(),
            limit=limit,
            metadata=metadata,
        )
