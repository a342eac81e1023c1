"""Opens a state directory. Commands that read caches need no more, and import no engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvlinker.base.events import Events
from kvlinker.base.types.chunks import with_places
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
