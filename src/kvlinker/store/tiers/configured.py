"""The registry of tiers by name: each names the settings it takes, and opens itself; ``open_store``
opens all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from pydantic import SecretStr, ValidationError

from kvlinker.base.errors import InvalidRequestError, did_you_mean
from kvlinker.base.events import Events
from kvlinker.base.registry import Registry
from kvlinker.base.types.chunks import Eviction
from kvlinker.store.eviction import NextUses
from kvlinker.store.format.codecs import RAW, Codec
from kvlinker.store.format.sealing import Sealing, sealing_of
from kvlinker.store.tiers.base import Tier

if TYPE_CHECKING:
    import torch

    from kvlinker.store.format.encryption import Cipher

SCRATCH = "advise"
"""The name of the folders for samples, next to those of the configured tiers. ``kvlinker-lab
advise`` writes them."""


class StoreSettings(Protocol):
    """The settings that a store reads; ``kvlinker.settings.Settings`` describes each."""

    @property
    def state_dir(self) -> Path: ...

    @property
    def device_memory(self) -> int | None: ...

    @property
    def host_memory(self) -> int: ...

    @property
    def disk_space(self) -> int: ...

    @property
    def disk_codec(self) -> str: ...

    @property
    def eviction(self) -> Eviction: ...

    @property
    def redis_url(self) -> SecretStr | None: ...

    @property
    def redis_codec(self) -> str: ...

    @property
    def redis_prefix(self) -> str: ...

    @property
    def object_url(self) -> SecretStr | None: ...

    @property
    def object_space(self) -> int: ...

    @property
    def object_codec(self) -> str: ...

    @property
    def tiers(self) -> Mapping[str, Mapping[str, Any]]: ...


@dataclass(frozen=True, slots=True)
class TierSetup:
    """The arguments that tiers are opened with."""

    settings: StoreSettings
    events: Events
    host_bytes: int
    """The budget of host memory in bytes; 0 if no engine in this process uses it."""
    cipher: Cipher | None = None
    """Encrypts the bytes that leave memory; None for no encryption."""
    device: torch.device | None = None
    """The device of the model that takes chunks from the store; None if there is none in this
    process."""
    pinned: Set[str] = frozenset()
    """The keys of chunks that are not to be evicted."""
    next_uses: NextUses | None = None
    """The expected next uses of chunks."""


class ConfiguredTier(ABC):
    """A tier as the settings describe it, before it is opened.

    Subclasses are registered. Those of other packages find their part of the setting ``tiers`` in
    ``options``.
    """

    name: ClassVar[str]
    """The tier's name in settings, events and figures."""
    rank: ClassVar[int]
    """The tier's place among all tiers, from the fastest to the slowest: the device's is 0, host
    memory's 10, and those of slower tiers are above."""
    settings: ClassVar[tuple[str, ...]] = ()
    """The fields of ``Settings`` that the tier reads; none where it reads ``options``."""

    def __init__(self, setup: TierSetup) -> None:
        self.setup = setup

    @property
    def options(self) -> Mapping[str, Any] | None:
        """The options under the tier's name in the setting ``tiers``; None if that does not name
        the tier."""
        return self.setup.settings.tiers.get(self.name)

    @property
    @abstractmethod
    def budget_bytes(self) -> int:
        """The budget in bytes; with 0, the tier is left out."""

    @property
    def is_left_out(self) -> bool:
        """True if the settings leave the tier out."""
        return not self.budget_bytes

    @abstractmethod
    def open(self) -> Tier:
        """Open the tier. Raises StoreError if that is not possible, and InvalidRequestError for bad
        settings."""

    @property
    def codec(self) -> Codec:
        """The codec with which the tier writes."""
        return RAW

    @property
    def sealing(self) -> Sealing:
        """The encryption of bytes that leave memory; without a cipher, they stay as they are."""
        return sealing_of(self.setup.cipher)

    def free_bytes(self) -> int | None:
        """Return the free bytes of the medium itself; None if that is not known."""
        return None

    @property
    def has_scratch(self) -> bool:
        """True if ``kvlinker-lab advise`` can measure the tier in a folder for samples."""
        return type(self).scratch is not ConfiguredTier.scratch

    def scratch(self, budget_bytes: int) -> AbstractContextManager[Tier]:
        """Open a tier for samples next to this one: on the same medium, with the same codec and
        encryption, but separate.

        Leaving the context removes everything in it.
        """
        raise NotImplementedError(f"the tier {self.name} has no place for samples")


K = TypeVar("K", bound=type[ConfiguredTier])

_registry: Registry[type[ConfiguredTier]] = Registry(
    "tier", own="kvlinker.store.tiers", group="kvlinker.tiers"
)


def register(kind: K) -> K:
    """Class decorator: makes the tier available under its ``name``. Raises ValueError if another
    has the name."""
    _registry.add(kind.name, kind)
    return kind


def configured_tiers(setup: TierSetup) -> list[ConfiguredTier]:
    """Return the tiers that the settings configure, not yet opened, from the fastest to the
    slowest.

    Raises InvalidRequestError if the setting ``tiers`` names one that is not known, or takes other
    settings, and where its options are wrong.
    """
    known = _registry.known()
    for name in setup.settings.tiers:
        if name not in known:
            raise InvalidRequestError(
                f"The setting tiers names {name!r}, but known tiers are {', '.join(sorted(known))}."
                " Install the package that brings it, or correct the"
                f" name.{did_you_mean(name, known)}",
                param="tiers",
            )
        if known[name].settings:
            raise InvalidRequestError(
                f"The tier {name} takes no options in tiers; set"
                f" {', '.join(known[name].settings)}.",
                param="tiers",
            )
    configured = [
        kind(setup) for kind in sorted(known.values(), key=lambda kind: (kind.rank, kind.name))
    ]
    return [tier for tier in configured if not _is_left_out(tier)]


def _is_left_out(tier: ConfiguredTier) -> bool:
    """Return whether the settings leave the tier out. Raises InvalidRequestError for options that
    are not valid."""
    try:
        return tier.is_left_out
    except ValidationError as error:
        complaints = "; ".join(
            f"{'.'.join(map(str, complaint['loc']))}: {complaint['msg']}"
            for complaint in error.errors()
        )
        raise InvalidRequestError(
            f"The options of tiers.{tier.name} are wrong: {complaints}.", param="tiers"
        ) from error
