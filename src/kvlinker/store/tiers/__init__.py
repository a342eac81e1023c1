"""Tiers beyond this machine, which several servers may share: Redis, and object stores."""

from __future__ import annotations

from functools import partial

from kvlinker.config import Settings
from kvlinker.errors import StoreError
from kvlinker.events import Events
from kvlinker.store.format.codecs import RAW, Codec, find_codec
from kvlinker.store.format.encryption import Cipher, Sealing
from kvlinker.store.tiers.medium import redacted
from kvlinker.store.tiers.remote import ANSWER_SECONDS, BlobTier

__all__ = ["BlobTier", "object_tier", "redis_tier", "shared_tiers"]

_EXCHANGE_SECONDS = ANSWER_SECONDS / 2


def shared_tiers(settings: Settings, events: Events, cipher: Cipher | None = None) -> list[BlobTier]:
    """The remote tiers that the settings name, from the fastest to the slowest; encrypted where there is a cipher.

    Raises StoreError for bad URLs."""
    tiers = []
    if settings.redis_url is not None and settings.redis_space:
        url = settings.redis_url.get_secret_value()
        codec = find_codec(settings.redis_codec)
        tiers.append(
            redis_tier(url, settings.redis_space, events, prefix=settings.redis_prefix, cipher=cipher, codec=codec)
        )
    if settings.object_url is not None and settings.object_space:
        url, codec = settings.object_url.get_secret_value(), find_codec(settings.object_codec)
        tiers.append(object_tier(url, settings.object_space, events, cipher=cipher, codec=codec))
    return tiers


def redis_tier(
    url: str,
    budget_bytes: int,
    events: Events,
    *,
    prefix: str = "kvlinker",
    cipher: Cipher | None = None,
    codec: Codec = RAW,
) -> BlobTier:
    """Chunks in a Redis server, under keys that begin with ``prefix``; it need not be up.

    Raises StoreError for a URL that is none, or where redis-py is missing.
    """
    try:
        from kvlinker.store.tiers.redis import RedisMedium
    except ModuleNotFoundError as error:
        raise _missing("redis") from error
    medium = RedisMedium(url, budget_bytes, prefix=prefix, timeout=_EXCHANGE_SECONDS)
    return BlobTier("redis", medium, events, conceal=partial(redacted, url=url), sealing=Sealing(cipher), codec=codec)


def object_tier(
    url: str,
    budget_bytes: int,
    events: Events,
    *,
    folder: str = "",
    cipher: Cipher | None = None,
    codec: Codec = RAW,
) -> BlobTier:
    """Chunks as objects in a folder below a URL that fsspec knows; it need not be reachable.

    Raises StoreError for a URL that is none, or where its library is missing.
    """
    try:
        from kvlinker.store.tiers.object import ObjectMedium
    except ModuleNotFoundError as error:
        raise _missing("remote") from error
    medium = ObjectMedium(url, budget_bytes, timeout=_EXCHANGE_SECONDS, folder=folder)
    return BlobTier("object", medium, events, conceal=partial(redacted, url=url), sealing=Sealing(cipher), codec=codec)


def _missing(extra: str) -> StoreError:
    return StoreError(f"A library is missing: install it with  pip install 'kvlinker[{extra}]'")
