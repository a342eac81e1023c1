"""Keeps chunks: their KV in tiers, and the catalog of the context caches that hold them."""

from __future__ import annotations

from collections.abc import Set
from contextlib import ExitStack
from typing import TYPE_CHECKING

from kvlinker.base.errors import StoreError
from kvlinker.base.events import ChunkNamed, Events
from kvlinker.base.types.chunks import (
    UNCHANGED,
    ContextCache,
    Eviction,
    Page,
    Unchanged,
    new_context_cache_id,
)
from kvlinker.store.catalog.catalog import Catalog
from kvlinker.store.catalog.limits import Limits, TenantUsage
from kvlinker.store.catalog.room import Room
from kvlinker.store.chunk_kv import ChunkKV, LayerKV
from kvlinker.store.chunk_store import ChunkStore
from kvlinker.store.eviction import NextUses
from kvlinker.store.format.sealing import load_cipher
from kvlinker.store.speeds import Speeds
from kvlinker.store.tiers.base import Tier, TierCheck, TierUsage
from kvlinker.store.tiers.configured import StoreSettings, TierSetup, configured_tiers
from kvlinker.store.tiers.device import DeviceTier
from kvlinker.store.tiers.disk import DiskTier
from kvlinker.store.tiers.host import HostTier

if TYPE_CHECKING:
    import torch

    from kvlinker.store.format.encryption import Cipher

__all__ = [
    "UNCHANGED",
    "Catalog",
    "ChunkKV",
    "ChunkStore",
    "ContextCache",
    "DeviceTier",
    "DiskTier",
    "Eviction",
    "HostTier",
    "LayerKV",
    "Limits",
    "NextUses",
    "Page",
    "Room",
    "Speeds",
    "StoreError",
    "TenantUsage",
    "Tier",
    "TierCheck",
    "TierUsage",
    "Unchanged",
    "load_cipher",
    "new_context_cache_id",
    "open_store",
]


def open_store(
    settings: StoreSettings,
    events: Events,
    *,
    host_bytes: int | None = None,
    device: torch.device | None = None,
    cipher: Cipher | None = None,
    pinned: Set[str] = frozenset(),
    speeds: Speeds | None = None,
) -> ChunkStore:
    """Open a store of all the tiers that the settings configure.

    ``host_bytes`` is the budget of host memory, ``settings.host_memory`` by default. ``device`` is
    where a model runs that takes chunks from the store. With a ``cipher``, what leaves memory is
    encrypted. ``pinned`` are keys that are not to be evicted (``Catalog.pinned``). ``speeds`` keeps
    what is measured of the tiers. Raises StoreError if a tier cannot be opened, and
    InvalidRequestError for settings that a tier does not take.
    """
    host_bytes = settings.host_memory if host_bytes is None else host_bytes
    next_uses = NextUses(events)
    events.subscribe(next_uses.listen, ChunkNamed)
    setup = TierSetup(
        settings,
        events,
        host_bytes,
        cipher=cipher,
        device=device,
        pinned=pinned,
        next_uses=next_uses,
    )
    with ExitStack() as opened:
        tiers = []
        for configured in configured_tiers(setup):
            tiers.append(configured.open())
            opened.callback(tiers[-1].close)
        copies = next((tier for tier in tiers if isinstance(tier, DeviceTier)), None)
        store = ChunkStore(
            [tier for tier in tiers if tier is not copies],
            events,
            device=copies,
            next_uses=next_uses,
            speeds=speeds,
        )
        opened.pop_all()
    return store
