"""Reads what GGUF files say of themselves, and where their tensors are, whatever is in them: each
count and length is compared with what the file has left. It loads no torch.

The package ``gguf`` has a reader, too, which takes ten times as long for the words of a large
vocabulary, and believes what files say.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType

from kvlinker.base.errors import ModelLoadError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
STRING, ARRAY = 8, 9
NUMBERS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
"""How ``struct`` reads the kinds of numbers in metadata."""

LENGTH = struct.Struct("<Q")

MOST_STRING_BYTES = 64 << 20
"""The bytes of the longest text that is read; chat templates and licences have some thousands."""

MOST_DIMENSIONS = 4
ALIGNMENT = 32
"""The alignment of tensors, in bytes, where a file does not say."""


class Place(NamedTuple):
    """Describes a tensor of a GGUF file."""

    path: Path
    shape: tuple[int, ...]
    """As PyTorch has it: the dimension whose values lie side by side is the last."""

    kind: GGMLQuantizationType
    begin: int
    nbytes: int


Tensors = dict[str, Place]


class GGUF(NamedTuple):
    """The metadata and tensors of a GGUF file."""

    metadata: dict[str, Any]
    tensors: Tensors


def read_gguf(path: Path) -> GGUF:
    """Read the metadata of a GGUF file, and where its tensors are. Raises ModelLoadError for a file
    that is none, is damaged, or ends before its tensors do."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as blob:
            return _Reading(path, blob).whole()
    except (OSError, ValueError, struct.error, OverflowError) as error:
        raise ModelLoadError(f"{path} cannot be read as GGUF: {error}.") from error


def gguf_facts(path: Path) -> tuple[str, int | None]:
    """Return how a GGUF file holds its weights, such as Q4_K_M, and the tokens of its context.
    Raises ModelLoadError for a file that is none."""
    metadata = read_gguf(path).metadata
    window = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    try:
        kind = LlamaFileType(metadata.get("general.file_type")).name.removeprefix("MOSTLY_")
    except ValueError:
        kind = "unknown"
    return f"{kind} (GGUF)", window if isinstance(window, int) else None


class _Reading:
    """Reads a file from its beginning to its tensors."""

    def __init__(self, path: Path, blob: mmap.mmap) -> None:
        self._path = path
        self._blob = blob
        self._at = 0

    def whole(self) -> GGUF:
        if self._bytes(len(MAGIC)) != MAGIC:
            raise ValueError("it does not begin with GGUF")
        (version,) = self._unpack("<I")
        if version not in VERSIONS:
            raise ValueError(f"its version is {version}, and those that are known are 2 and 3")
        tensor_count, entry_count = self._unpack("<QQ")
        metadata = {self._string(): self._value() for _ in range(self._counted(entry_count, 13))}
        found = [self._tensor() for _ in range(self._counted(tensor_count, 24))]
        alignment = metadata.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"its alignment is {alignment!r}")
        begin = -(-self._at // alignment) * alignment
        tensors: Tensors = {}
        for name, place in found:
            moved = place._replace(begin=begin + place.begin)
            if moved.begin + moved.nbytes > len(self._blob):
                raise ValueError(f"it ends before its tensor {name!r}: download it again")
            if name in tensors:
                raise ValueError(f"it has two tensors of the name {name!r}")
            tensors[name] = moved
        return GGUF(metadata, tensors)

    def _tensor(self) -> tuple[str, Place]:
        name = self._string()
        (dimensions,) = self._unpack("<I")
        if dimensions > MOST_DIMENSIONS:
            raise ValueError(f"its tensor {name!r} has {dimensions} dimensions")
        shape = tuple(reversed(self._unpack(f"<{dimensions}Q"))) or (1,)
        number, begin = self._unpack("<IQ")
        kind = GGMLQuantizationType(number)
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            raise ValueError(f"its tensor {name!r} has rows of {shape[-1]}, in blocks of {block}")
        nbytes = math.prod(shape) // block * block_bytes
        return name, Place(self._path, shape, kind, begin, nbytes)

    def _value(self) -> Any:
        (kind,) = self._unpack("<I")
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            return self._unpack("<" + _number(kind))[0]
        kind, count = self._unpack("<IQ")
        if kind == STRING:
            return self._strings(self._counted(count, 8))
        number = _number(kind)
        self._counted(count, struct.calcsize(number))
        return list(self._unpack(f"<{count}{number}"))

    def _counted(self, count: int, least_bytes: int) -> int:
        """Return ``count``, of items that have at least ``least_bytes`` each. Raises ValueError if
        the rest of the file is shorter."""
        if count * least_bytes > len(self._blob) - self._at:
            raise ValueError(f"it ends before {count} entries that it promises")
        return count

    def _string(self) -> str:
        (length,) = self._unpack("<Q")
        if length > MOST_STRING_BYTES:
            raise ValueError(f"it has a text of {length} bytes")
        return self._bytes(length).decode("utf-8", errors="replace")

    def _strings(self, count: int) -> list[str]:
        """Return what ``_string`` returns so often: vocabularies have some hundred thousand."""
        blob, at, found = self._blob, self._at, []
        for _ in range(count):
            (length,) = LENGTH.unpack_from(blob, at)
            if length > MOST_STRING_BYTES:
                raise ValueError(f"it has a text of {length} bytes")
            at += LENGTH.size
            found.append(blob[at : at + length].decode("utf-8", "replace"))
            at += length
        self._bytes(at - self._at)  # which it has not where the last ones were cut off
        return found

    def _unpack(self, form: str) -> tuple[Any, ...]:
        return struct.unpack(form, self._bytes(struct.calcsize(form)))

    def _bytes(self, count: int) -> bytes:
        if count > len(self._blob) - self._at:
            raise ValueError("it ends too early: download it again")
        found = self._blob[self._at : self._at + count]
        self._at += count
        return found


def _number(kind: int) -> str:
    if kind not in NUMBERS:
        raise ValueError(f"its metadata has a value of the unknown kind {kind}")
    return NUMBERS[kind]
