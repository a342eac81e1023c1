"""Registers tiers by name: each says what of the settings it takes, and opens itself; ``open_store`` asks all of
them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from pydantic import ValidationError

from kvlinker.errors import InvalidRequestError, did_you_mean
from kvlinker.events import Events
from kvlinker.registry import Registry
from kvlinker.store.format.codecs import RAW, Codec
from kvlinker.store.format.encryption import Cipher, Sealing
from kvlinker.store.loading.throughput import speed_name
from kvlinker.store.tiers.base import Tier

if TYPE_CHECKING:
    import torch

    from kvlinker.config import Settings

SCRATCH = "advise"
"""The name of places for samples, beside those of the configured tiers: ``kvlinker advise`` writes them."""


@dataclass(frozen=True, slots=True)
class TierSetup:
    """What tiers are opened with."""

    settings: Settings
    events: Events
    host_bytes: int
    """The budget of host memory in bytes: 0 where nobody in this process computes with what lies there."""
    cipher: Cipher | None = None
    """Encrypts what leaves memory; None leaves it as it is."""
    device: torch.device | None = None
    """The device of the model that takes chunks from the store; None where none does in this process."""
    pinned: Set[str] = frozenset()
    """Keys of chunks that are not to be evicted."""


class ConfiguredTier(ABC):
    """A tier as the settings describe it, before it is opened.

    Subclasses are registered. Those of other packages find what the setting ``tiers`` says under their name in
    ``options``.
    """

    name: ClassVar[str]
    """What settings, events and figures call the tier."""
    rank: ClassVar[int]
    """The place among all tiers, from the fastest to the slowest: above 10, which is host memory's."""
    settings: ClassVar[tuple[str, ...]] = ()
    """The fields of ``Settings`` that it takes; none where it takes ``options``."""

    def __init__(self, setup: TierSetup) -> None:
        self.setup = setup

    @property
    def options(self) -> Mapping[str, Any] | None:
        """What the setting ``tiers`` says under the tier's name; None where it does not name the tier."""
        return self.setup.settings.tiers.get(self.name)

    @property
    @abstractmethod
    def budget_bytes(self) -> int:
        """The budget in bytes; with 0, the tier is left out."""

    @property
    def is_left_out(self) -> bool:
        """True where the settings do without the tier."""
        return not self.budget_bytes

    @abstractmethod
    def open(self) -> Tier:
        """Open the tier. Raises StoreError where that is not possible, and InvalidRequestError for bad settings."""

    @property
    def codec(self) -> Codec:
        """The codec that the tier writes with."""
        return RAW

    @property
    def place(self) -> str:
        """Where the tier lies, without credentials."""
        return self.name

    @property
    def sealing(self) -> Sealing:
        """Encrypts what leaves memory, where there is a cipher."""
        return Sealing(self.setup.cipher)

    @property
    def speed_name(self) -> str:
        """The name that the tier's bandwidth is remembered under: that of the opened tier."""
        return speed_name(self.name, place=self.place, codec=self.codec, sealing=self.sealing)

    def free_bytes(self) -> int | None:
        """Return how many bytes the medium itself has free; None where that is not known."""
        return None

    @property
    def has_scratch(self) -> bool:
        """True where ``kvlinker advise`` can measure the tier, in a place for samples."""
        return type(self).scratch is not ConfiguredTier.scratch

    def scratch(self, budget_bytes: int) -> AbstractContextManager[Tier]:
        """Open a tier for samples that lies beside this one: same medium, codec and encryption, but apart.

        Leaving the context removes all that is in it.
        """
        raise NotImplementedError(f"the tier {self.name} has no place for samples")


K = TypeVar("K", bound=type[ConfiguredTier])

_registry: Registry[type[ConfiguredTier]] = Registry("tier", own="kvlinker.store.tiers", group="kvlinker.tiers")


def register(kind: K) -> K:
    """Class decorator: makes the tier available under its ``name``. Raises ValueError where another has the name."""
    _registry.add(kind.name, kind)
    return kind


def configured_tiers(setup: TierSetup) -> list[ConfiguredTier]:
    """Return the tiers that the settings configure, not yet opened, from the fastest to the slowest.

    Raises InvalidRequestError where the setting ``tiers`` names one that is not known, or takes other settings, and
    where its options are wrong.
    """
    known = _registry.known()
    for name in setup.settings.tiers:
        if name not in known:
            raise InvalidRequestError(
                f"The setting tiers names {name!r}, but known tiers are {', '.join(sorted(known))}. Install the "
                f"package that brings it, or correct the name.{did_you_mean(name, known)}",
                param="tiers",
            )
        if known[name].settings:
            raise InvalidRequestError(
                f"The tier {name} takes no options in tiers; set {', '.join(known[name].settings)}.", param="tiers"
            )
    configured = [kind(setup) for kind in sorted(known.values(), key=lambda kind: (kind.rank, kind.name))]
    return [tier for tier in configured if not _is_left_out(tier)]


def _is_left_out(tier: ConfiguredTier) -> bool:
    """Return whether the settings do without the tier. Raises InvalidRequestError for options that are not valid."""
    try:
        return tier.is_left_out
    except ValidationError as error:
        complaints = "; ".join(
            f"{'.'.join(map(str, complaint['loc']))}: {complaint['msg']}" for complaint in error.errors()
        )
        raise InvalidRequestError(
            f"The options of tiers.{tier.name} are wrong: {complaints}.", param="tiers"
        ) from error
