"""Finds places for samples next to the configured tiers, where no server lists or evicts them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from kvlinker.base.events import Events
from kvlinker.settings import Settings
from kvlinker.store.format.codecs import Codec
from kvlinker.store.format.encryption import Cipher
from kvlinker.store.tiers import ConfiguredTier, Tier, TierSetup, configured_tiers


@dataclass(frozen=True, slots=True)
class ScratchPlace:
    """The place for samples of one configured tier: on the same medium, with the same codec and
    encryption, but separate."""

    tier: str
    codec: Codec
    room_bytes: int
    """The bytes that samples may take."""
    open: Callable[[int], AbstractContextManager[Tier]]
    """Opens a tier with this budget in bytes; leaving the context removes it with all that is in
    it."""


def scratch_places(settings: Settings, cipher: Cipher | None) -> list[ScratchPlace]:
    """Return a place for each tier but memory that the settings configure, from the fastest to the
    slowest.

    Samples may take a tenth of the tier's budget in addition to it, and half of the free space of
    its medium. Raises StoreError.
    """
    setup = TierSetup(settings, Events(), host_bytes=0, cipher=cipher)
    return [
        ScratchPlace(tier.name, tier.codec, _room_bytes(tier), tier.scratch)
        for tier in configured_tiers(setup)
        if tier.has_scratch
    ]


def _room_bytes(tier: ConfiguredTier) -> int:
    free_bytes = tier.free_bytes()
    room_bytes = tier.budget_bytes // 10
    return room_bytes if free_bytes is None else min(room_bytes, free_bytes // 2)
