"""Tiers, which keep chunks from the fastest medium to the slowest: one file each, registered by
name."""

from kvlinker.store.tiers.base import Tier, TierCheck, TierUsage
from kvlinker.store.tiers.configured import ConfiguredTier, TierSetup, configured_tiers, register
from kvlinker.store.tiers.object import object_tier
from kvlinker.store.tiers.redis import redis_tier
from kvlinker.store.tiers.remote import BlobTier

__all__ = [
    "BlobTier",
    "ConfiguredTier",
    "Tier",
    "TierCheck",
    "TierSetup",
    "TierUsage",
    "configured_tiers",
    "object_tier",
    "redis_tier",
    "register",
]
