"""Places beside the configured tiers for samples of no worth: nothing in them is listed or evicted by anybody else."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvlinker.config import Settings
from kvlinker.errors import StoreError
from kvlinker.events import Events
from kvlinker.store.format.codecs import Codec, find_codec
from kvlinker.store.format.encryption import Cipher, Sealing
from kvlinker.store.loading.bandwidth import speed_name
from kvlinker.store.tiers import BlobTier, object_tier, redis_tier
from kvlinker.store.tiers.base import Tier
from kvlinker.store.tiers.disk import DiskTier
from kvlinker.store.tiers.medium import place_of

_NAME = "advise"
_STALE_SECONDS = 3600.0
"""A folder of samples that is older was left by a process that was killed."""


@dataclass(frozen=True, slots=True)
class ScratchPlace:
    """Where the samples of one configured tier go: same place, codec and encryption, but apart.

    ``speed_name`` is the configured tier's, ``room_bytes`` what samples may take. ``open``, given a budget in bytes,
    makes the scratch tier and removes it with all that is in it.
    """

    tier: str
    codec: Codec
    speed_name: str
    room_bytes: int
    open: Callable[[int], AbstractContextManager[Tier]]


def scratch_places(settings: Settings, cipher: Cipher | None) -> list[ScratchPlace]:
    """One for each tier but memory that the settings configure, from the fastest to the slowest. Samples may take a
    tenth of the tier's budget, beside it, and of a disk half of what is free. Raises StoreError."""
    sealing, places = Sealing(cipher), []
    if settings.disk_space:
        folder, codec = settings.state_dir, find_codec(settings.disk_codec)
        chunks = str((folder / "chunks").absolute())
        room = min(settings.disk_space // 10, _free_bytes(folder) // 2)
        name = speed_name("disk", place=chunks, codec=codec, sealing=sealing)
        places.append(ScratchPlace("disk", codec, name, room, partial(_disk, folder, codec, sealing)))
    if settings.redis_url is not None and settings.redis_space:
        url, codec = settings.redis_url.get_secret_value(), find_codec(settings.redis_codec)
        prefix = f"{settings.redis_prefix}:{_NAME}"
        make = partial(redis_tier, url, events=Events(), prefix=prefix, cipher=cipher, codec=codec)
        name = speed_name("redis", place=place_of(url), codec=codec, sealing=sealing)
        places.append(ScratchPlace("redis", codec, name, settings.redis_space // 10, partial(_remote, make)))
    if settings.object_url is not None and settings.object_space:
        url, codec = settings.object_url.get_secret_value(), find_codec(settings.object_codec)
        make = partial(object_tier, url, events=Events(), folder=_NAME, cipher=cipher, codec=codec)
        name = speed_name("object", place=place_of(url), codec=codec, sealing=sealing)
        places.append(ScratchPlace("object", codec, name, settings.object_space // 10, partial(_remote, make)))
    return places


@contextmanager
def _disk(folder: Path, codec: Codec, sealing: Sealing, budget_bytes: int) -> Iterator[Tier]:
    for left in folder.glob(f"{_NAME}-*"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=f"{_NAME}-", dir=folder) as scratch:
        yield DiskTier(Path(scratch), budget_bytes, Events(), sealing=sealing, codec=codec)


@contextmanager
def _remote(make: Callable[[int], BlobTier], budget_bytes: int) -> Iterator[Tier]:
    tier = make(budget_bytes)
    try:
        tier.clear()  # what a process that was killed has left
        yield tier
    finally:
        tier.clear()
        tier.close()


def _free_bytes(folder: Path) -> int:
    """Creates the folder where it is missing. Raises StoreError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return shutil.disk_usage(folder).free
    except OSError as error:
        raise StoreError(
            f"The state directory {folder} cannot be used: {error}. Make it a folder that this user may write to, or "
            "choose another."
        ) from error
