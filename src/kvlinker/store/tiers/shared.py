"""The settings of the tiers that servers share. A tier that is configured imports its module in
``store/remote``; without the setting, nothing does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from kvlinker.base.events import Events
from kvlinker.store.format.codecs import Codec, find_codec
from kvlinker.store.tiers.base import UNKNOWN_BUDGET, Tier
from kvlinker.store.tiers.configured import SCRATCH, ConfiguredTier, register

if TYPE_CHECKING:
    from kvlinker.store.remote.blob_tier import BlobTier


@register
class ConfiguredRedis(ConfiguredTier):
    """Keeps chunks in the Redis server that ``redis_url`` names."""

    name = "redis"
    rank = 30
    settings = ("redis_url", "redis_codec", "redis_prefix")

    @property
    def budget_bytes(self) -> int:
        """Not known before it is open, and answers."""
        return 0 if self.setup.settings.redis_url is None else UNKNOWN_BUDGET

    @property
    def codec(self) -> Codec:
        return find_codec(self.setup.settings.redis_codec)

    def open(self) -> Tier:
        return self._open_tier(self.setup.events, self.setup.settings.redis_prefix)

    def scratch(self, budget_bytes: int) -> AbstractContextManager[Tier]:
        return _scratch_tier(
            self._open_tier(Events(), f"{self.setup.settings.redis_prefix}:{SCRATCH}")
        )

    def _open_tier(self, events: Events, prefix: str) -> BlobTier:
        from kvlinker.store.remote.redis import redis_tier

        url = self.setup.settings.redis_url
        assert url is not None  # else it is left out
        return redis_tier(
            url.get_secret_value(),
            events,
            prefix=prefix,
            cipher=self.setup.cipher,
            codec=self.codec,
        )


@register
class ConfiguredObjects(ConfiguredTier):
    """Keeps chunks in the object store that ``object_url`` names."""

    name = "object"
    rank = 40
    settings = ("object_url", "object_space", "object_codec")

    @property
    def budget_bytes(self) -> int:
        return 0 if self.setup.settings.object_url is None else self.setup.settings.object_space

    @property
    def codec(self) -> Codec:
        return find_codec(self.setup.settings.object_codec)

    def open(self) -> Tier:
        return self._open_tier(self.budget_bytes, self.setup.events)

    def scratch(self, budget_bytes: int) -> AbstractContextManager[Tier]:
        return _scratch_tier(self._open_tier(budget_bytes, Events(), SCRATCH))

    def _open_tier(self, budget_bytes: int, events: Events, folder: str = "") -> BlobTier:
        from kvlinker.store.remote.objects import object_tier

        url = self.setup.settings.object_url
        assert url is not None  # else it is left out
        return object_tier(
            url.get_secret_value(),
            budget_bytes,
            events,
            folder=folder,
            cipher=self.setup.cipher,
            codec=self.codec,
        )


@contextmanager
def _scratch_tier(tier: BlobTier) -> Iterator[BlobTier]:
    """Yield a tier for samples: emptied of what a process that was killed has left, and in the end
    removed."""
    try:
        tier.clear()
        yield tier
    finally:
        tier.clear()
        tier.close()
