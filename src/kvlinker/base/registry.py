"""Registers plug-ins by name, such as codecs and tiers: kvlinker's own, and those of other
packages."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import entry_points
from pkgutil import walk_packages
from types import MappingProxyType
from typing import Generic, TypeVar

from kvlinker.base.errors import KVLinkerError

T = TypeVar("T")


class Registry(Generic[T]):
    """Holds one kind of thing by name.

    kvlinker's own are registered by the modules of one package and of those in it, which are
    imported when the registry is first asked. Other packages name a module under an entry point
    group, and that module registers theirs in the same way; a program may also register its own in
    process.
    """

    def __init__(self, kind: str, *, own: str, group: str) -> None:
        """Make an empty registry.

        ``kind`` is the word for one of its values in messages, ``own`` the package whose modules
        register kvlinker's own, and ``group`` the entry point group of other packages.
        """
        self._kind = kind
        self._own = own
        self._group = group
        self._loaded = False
        self._values: dict[str, T] = {}

    def add(self, name: str, value: T) -> T:
        """Register the value and return it. Raises ValueError if another value has the name."""
        known = self._values.setdefault(name, value)
        if known is not value:
            raise ValueError(
                f"The {self._kind} {name!r} is registered already, by {_module_of(known)}."
            )
        return value

    def registered(self) -> Mapping[str, T]:
        """Return the values by name that are registered so far, without importing what registers
        others."""
        return MappingProxyType(self._values)

    def known(self) -> Mapping[str, T]:
        """Return all values by name. Raises KVLinkerError if a package that brings some cannot be
        imported."""
        if not self._loaded:
            for module in walk_packages(import_module(self._own).__path__, f"{self._own}."):
                import_module(module.name)
            for entry_point in entry_points(group=self._group):
                try:
                    entry_point.load()
                except Exception as error:
                    raise KVLinkerError(
                        f"The {self._kind} {entry_point.name!r} cannot be loaded from"
                        f" {entry_point.value}: {error}. Repair or uninstall the package that"
                        " brings it."
                    ) from error
            self._loaded = True
        return self.registered()


def _module_of(value: object) -> str:
    """Return the name of the module that a class, or the class of an instance, comes from."""
    return (value if isinstance(value, type) else type(value)).__module__
