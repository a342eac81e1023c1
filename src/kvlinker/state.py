"""What outlives the process: the catalog and the chunks of one state directory, and shared tiers."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvlinker.config import Settings
from kvlinker.events import Events
from kvlinker.store import Catalog, ChunkStore, Speeds, device_tier, load_cipher, open_store
from kvlinker.store.codecs import find_codec
from kvlinker.store.remote import shared_tiers


class State(NamedTuple):
    """To be closed by its owner, the store first: it may still write what the catalog holds."""

    catalog: Catalog
    store: ChunkStore


def open_state(
    settings: Settings,
    events: Events,
    *,
    host_bytes: int,
    device: torch.device | None = None,
    speeds: Speeds | None = None,
) -> State:
    """The catalog and the store that the settings name, the store with ``host_bytes`` in memory; ``device``: where a
    model runs that takes chunks from it. ``speeds`` keeps what is measured of its tiers.

    Raises StoreError where one of them cannot be used, and InvalidRequestError for a budget of a device without memory
    of its own.
    """
    copies = None
    if device is not None:
        copies = device_tier(settings.device_memory, device, events, eviction=settings.eviction)
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
            eviction=settings.eviction,
            device=copies,
            shared=shared_tiers(settings, events, cipher),
            speeds=speeds,
        )
    except BaseException:
        catalog.close()
        raise
    return State(catalog, store)
