"""What outlives the process: the catalog and the chunks of one state directory, and shared tiers."""

from __future__ import annotations

from typing import NamedTuple

from kvlinker.config import Settings
from kvlinker.events import Events
from kvlinker.store import Catalog, ChunkStore, load_cipher, open_store
from kvlinker.store.codecs import find_codec
from kvlinker.store.remote import shared_tiers


class State(NamedTuple):
    """To be closed by its owner, the store first: it may still write what the catalog holds."""

    catalog: Catalog
    store: ChunkStore


def open_state(settings: Settings, events: Events, *, host_bytes: int) -> State:
    """The catalog and the store that the settings name, the store with ``host_bytes`` in memory.

    Raises StoreError where one of them cannot be used.
    """
    cipher = load_cipher(settings.encryption_key)
    catalog = Catalog(settings.state_dir / "catalog.sqlite", cipher)
    try:
        store = open_store(
            settings.state_dir / "chunks",
            host_bytes=host_bytes,
            disk_bytes=settings.disk_space,
            events=events,
            pinned=catalog.pinned(),
            cipher=cipher,
            disk_codec=find_codec(settings.disk_codec),
            shared=shared_tiers(settings, events, cipher),
        )
    except BaseException:
        catalog.close()
        raise
    return State(catalog, store)
