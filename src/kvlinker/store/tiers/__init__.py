"""Tiers, which keep chunks from the fastest medium to the slowest, registered by name."""

from kvlinker.store.tiers.base import Tier, TierCheck, TierUsage
from kvlinker.store.tiers.configured import ConfiguredTier, TierSetup, configured_tiers, register

__all__ = [
    "ConfiguredTier",
    "Tier",
    "TierCheck",
    "TierSetup",
    "TierUsage",
    "configured_tiers",
    "register",
]
