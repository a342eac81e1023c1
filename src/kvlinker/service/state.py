"""Opens a state directory, and searches one by words. Commands that read caches need no more, and
import no engine."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvlinker.base.events import Events
from kvlinker.base.types.chunks import with_places
from kvlinker.base.types.texts import SearchHit
from kvlinker.settings import Settings
from kvlinker.store import Catalog, ChunkStore, Speeds, load_cipher, open_store

if TYPE_CHECKING:
    import torch


class StateDirectory(NamedTuple):
    """A state directory's catalog and store. The owner closes the store first: it may still write
    chunks of the catalog."""

    catalog: Catalog
    store: ChunkStore


def open_state(
    settings: Settings,
    events: Events,
    *,
    host_bytes: int,
    device: torch.device | None = None,
    speeds: Speeds | None = None,
) -> StateDirectory:
    """Open the catalog and the store that the settings name, the store with ``host_bytes`` in
    memory.

    ``device`` is where a model runs that takes chunks from the store; ``speeds`` keeps what is
    measured of its tiers. Raises StoreError if one of them cannot be used, and InvalidRequestError
    for settings that a tier does not take.
    """
    cipher = load_cipher(settings.encryption_key)
    catalog = Catalog(settings.catalog_place, cipher)
    try:
        store = open_store(
            settings,
            events,
            host_bytes=host_bytes,
            device=device,
            cipher=cipher,
            pinned=with_places(catalog.pinned()),
            speeds=speeds,
        )
    except BaseException:
        catalog.close()
        raise
    return StateDirectory(catalog, store)


def search_by_words(
    settings: Settings, query: str, *, tenant: str, limit: int, metadata: Mapping[str, str]
) -> tuple[SearchHit, ...] | None:
    """Return what ``LLM.search`` would find by words; None where it takes the model to know: the
    model is new here, search is off or is by meaning, too, or texts are not in the index yet."""
    if settings.engine != "embedded" or settings.embedding_model or not settings.searchable:
        return None
    # It imports the hub's client, which most commands that read caches do not need.
    from kvlinker.engines.contract.known_models import remembered_fingerprint

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
