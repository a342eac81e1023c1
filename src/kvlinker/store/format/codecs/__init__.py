"""Codecs, which encode a tier's keys and values, found by name. Every module of this package
registers some."""

from kvlinker.store.format.codecs.base import (
    COMPRESSED_RAW,
    RAW,
    Codec,
    Layout,
    Parts,
    Room,
    find_codec,
    known_codecs,
    register,
)

__all__ = [
    "COMPRESSED_RAW",
    "RAW",
    "Codec",
    "Layout",
    "Parts",
    "Room",
    "find_codec",
    "known_codecs",
    "register",
]
