"""The codec interface, the registry of codecs by name, and the codec ``raw``, which changes
nothing.

A codec turns one layer's keys or values [heads, tokens, dim] into named parts and back. Each is
registered twice: plain, and as ``<name>+zstd``, with its parts compressed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from kvlinker.base.errors import InvalidRequestError, StoreError, did_you_mean
from kvlinker.base.registry import Registry
from kvlinker.store.format.compression import MissingLibraryError, require_zstd
from kvlinker.store.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor

Parts: TypeAlias = "Mapping[str, Tensor]"
"""Named tensors, in order; "" names the main one, whose first two dimensions are [heads,
tokens]."""

Layout: TypeAlias = "Mapping[str, tuple[torch.dtype, int]]"
"""The dtype and the number of dimensions of each part."""

Room: TypeAlias = "Callable[..., Tensor]"
"""Allocates a tensor as ``torch.empty`` does: called with its shape and ``dtype=``."""


def any_room(*shape: Any, **options: Any) -> Tensor:
    """Allocate a tensor in memory of its own: a ``Room``."""
    return torch.empty(*shape, **options)


class Codec(Protocol):
    """Encodes keys or values [heads, tokens, dim] of a floating dtype, and decodes them. It holds
    no state."""

    @property
    def name(self) -> str:
        """The name in settings and in stored files."""

    @property
    def compresses(self) -> bool:
        """True if the parts are stored compressed (``kvlinker.store.format.compression``)."""

    def layout(self, dtype: torch.dtype) -> Layout:
        """Describe the parts that heads of this dtype become."""

    def encode(self, heads: Tensor) -> Parts:
        """Turn heads into contiguous CPU tensors. Raises ValueError for numbers that the codec
        cannot write."""

    def decode(self, parts: Parts, dtype: torch.dtype, room: Room = any_room) -> Tensor:
        """Turn the parts of one ``encode`` into [heads, tokens, dim], in ``room`` unless that is
        one of the parts."""


class Compressed:
    """Writes another codec's parts compressed."""

    compresses = True

    def __init__(self, codec: Codec) -> None:
        self.name = f"{codec.name}+zstd"
        self.layout = codec.layout
        self.encode = codec.encode
        self.decode = codec.decode


C = TypeVar("C", bound=type[Codec])

_registry: Registry[type[Codec]] = Registry(
    "codec", own="kvlinker.store.format.codecs", group="kvlinker.codecs"
)


def register(kind: C) -> C:
    """Class decorator: makes the codec available under its ``name``, and compressed under
    ``<name>+zstd``.

    Raises ValueError if another class has the name, or the name has a "+".
    """
    name = kind().name
    if "+" in name:
        raise ValueError(f"The codec {name!r} has a '+' in its name, which is reserved for zstd.")
    _registry.add(name, kind)
    return kind


def known_codecs() -> Mapping[str, Codec]:
    """Return all registered codecs by name, those of installed packages included, and then all of
    them compressed."""
    plain: list[Codec] = [kind() for kind in _registry.known().values()]
    return {codec.name: codec for codec in (*plain, *map(Compressed, plain))}


def find_codec(name: str) -> Codec:
    """Return the codec of this name, ready to be used.

    Raises InvalidRequestError, which lists the names, for an unknown one, and StoreError if its
    library is missing.
    """
    known = known_codecs()
    if name not in known:
        raise InvalidRequestError(
            f"Unknown codec {name!r}; known are {', '.join(known)}.{did_you_mean(name, known)}",
            param="codec",
        )
    codec = known[name]
    if codec.compresses:
        try:
            require_zstd()
        except MissingLibraryError as error:
            raise StoreError(f"The codec {name} cannot be used: {error}") from error
    return codec


@register
class Raw:
    """Stores the numbers unchanged. Also used for numbers that another codec refuses."""

    name = "raw"
    compresses = False

    def layout(self, dtype: torch.dtype) -> Layout:
        return {"": (dtype, 3)}

    def encode(self, heads: Tensor) -> Parts:
        return {"": heads.contiguous()}

    def decode(self, parts: Parts, dtype: torch.dtype, room: Room = any_room) -> Tensor:
        return parts[""]


RAW: Codec = Raw()
COMPRESSED_RAW: Codec = Compressed(RAW)
