"""Compresses stored tensors with zstd, below the codecs and without loss; chunk files are the
caller.

Numbers of several bytes are shuffled first: all lowest bytes, then the next ones. Signs and
exponents, which are alike, so come together, and digits, which are noise, apart.
"""

from __future__ import annotations

import math
from functools import cache
from types import ModuleType

import numpy as np

from kvlinker.base.installing import install_command
from kvlinker.store.format.byte_source import Bytes
from kvlinker.store.lazy_torch import torch

LEVEL = 3
"""The level of zstd: its own default."""

_LEAST_WINDOW = 1024
"""The smallest window, in bytes, that a frame of zstd can ask for."""

MOST_EXPANSION = 64
"""The largest ratio of decompressed to compressed bytes, so that no file can claim more memory;
chosen by hand. Tensors that would shrink further are stored uncompressed."""


class UnreadableHereError(Exception):
    """Raised for what is sound, but not for this installation to read; the message says what it
    needs."""


class MissingLibraryError(UnreadableHereError):
    """Raised when an optional library is not installed; the message says how to install it."""


def require_zstd() -> None:
    """Check that zstandard is installed. Raises MissingLibraryError."""
    _zstandard()


def compressed(tensor: torch.Tensor) -> torch.Tensor | None:
    """Compress the bytes of a contiguous CPU tensor: [length], uint8; None if that saves nothing,
    or more than MOST_EXPANSION.

    Raises MissingLibraryError.
    """
    shuffled = tensor.view(-1).view(torch.uint8).view(-1, tensor.element_size()).numpy().T.copy()
    data = _zstandard().ZstdCompressor(level=LEVEL, write_content_size=True).compress(shuffled)
    if not len(data) < tensor.nbytes <= MOST_EXPANSION * len(data):
        return None
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())


def decompressed(data: Bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the tensor that ``compressed`` was given. Takes no more memory than the tensor and
    ``data``.

    Raises ValueError for bytes that are not exactly a compressed tensor of this dtype and shape,
    and MissingLibraryError.
    """
    zstandard = _zstandard()
    count = math.prod(shape)
    try:
        frame = zstandard.get_frame_parameters(data)
        if frame.content_size != count * dtype.itemsize:
            raise ValueError(
                f"it says that it holds {frame.content_size} bytes instead of"
                f" {count * dtype.itemsize}"
            )
        if frame.window_size > max(frame.content_size, _LEAST_WINDOW):
            raise ValueError(f"it asks for {frame.window_size} bytes of memory")
        plain = zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error
    numbers: Bytes = np.empty((count, dtype.itemsize), dtype=np.uint8)
    for place, values in enumerate(
        np.frombuffer(plain, dtype=np.uint8).reshape(dtype.itemsize, count)
    ):
        numbers[:, place] = values
    return torch.from_numpy(numbers).view(-1).view(dtype).view(shape)


@cache
def _zstandard() -> ModuleType:
    try:
        import zstandard
    except ModuleNotFoundError as error:
        raise MissingLibraryError(
            f"zstandard is missing: install it with  {install_command('zstd')}"
        ) from error
    return zstandard
