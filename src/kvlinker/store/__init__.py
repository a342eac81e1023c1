"""Chunk caches: their KV in tiers, and the catalog of the context caches that hold them."""

from __future__ import annotations

from collections.abc import Sequence, Set
from pathlib import Path

from kvlinker.errors import StoreError
from kvlinker.events import Events
from kvlinker.store.catalog.catalog import Catalog
from kvlinker.store.catalog.limits import Limits, TenantUsage
from kvlinker.store.chunk_kv import ChunkKV, LayerKV
from kvlinker.store.chunk_store import ChunkStore
from kvlinker.store.eviction import Eviction
from kvlinker.store.format.codecs import RAW, Codec
from kvlinker.store.format.encryption import Cipher, Sealing, load_cipher
from kvlinker.store.loading.speeds import Speeds
from kvlinker.store.tiers.base import Tier, TierCheck, TierUsage
from kvlinker.store.tiers.device import DeviceTier, device_tier
from kvlinker.store.tiers.disk import DiskTier
from kvlinker.store.tiers.host import HostTier
from kvlinker.types.context_cache import UNCHANGED, ContextCache, Page, Unchanged, new_context_cache_id

__all__ = [
    "UNCHANGED",
    "Catalog",
    "ChunkKV",
    "ChunkStore",
    "Cipher",
    "ContextCache",
    "DeviceTier",
    "DiskTier",
    "Eviction",
    "HostTier",
    "LayerKV",
    "Limits",
    "Page",
    "Speeds",
    "StoreError",
    "TenantUsage",
    "Tier",
    "TierCheck",
    "TierUsage",
    "Unchanged",
    "device_tier",
    "load_cipher",
    "new_context_cache_id",
    "open_store",
]


def open_store(
    directory: Path,
    *,
    host_bytes: int,
    disk_bytes: int,
    events: Events,
    pinned: Set[str] = frozenset(),
    shared: Sequence[Tier] = (),
    cipher: Cipher | None = None,
    disk_codec: Codec = RAW,
    eviction: Eviction = "lru",
    device: DeviceTier | None = None,
    speeds: Speeds | None = None,
) -> ChunkStore:
    """A store of host memory over chunk files in ``directory``, each with its budget, over ``shared`` tiers; without
    disk where its budget is 0.

    ``pinned``: keys that are not to be evicted (``Catalog.pinned``). With a ``cipher``, what leaves memory is
    encrypted; ``disk_codec`` is what files are written in. ``eviction``: the order of host memory and disk.
    ``device``: a tier before them. ``speeds`` keeps what is measured. Raises StoreError where the directory cannot be
    used.
    """
    tiers: list[Tier] = [HostTier(host_bytes, events, pinned=pinned, eviction=eviction)]
    if disk_bytes:
        tiers.append(
            DiskTier(
                directory,
                disk_bytes,
                events,
                pinned=pinned,
                sealing=Sealing(cipher),
                codec=disk_codec,
                eviction=eviction,
            )
        )
    return ChunkStore([*tiers, *shared], events, device=device, speeds=speeds)
