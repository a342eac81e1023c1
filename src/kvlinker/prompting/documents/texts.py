"""Extracts the text of a file: converts known formats, and guesses the encoding of others."""

from __future__ import annotations

import codecs
from dataclasses import dataclass

from charset_normalizer import from_bytes

from kvlinker.prompting.documents.conversion import FORMATS, convert

_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # begins with the mark of UTF-16
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
"""Byte order marks, which identify an encoding."""

_USUAL = "cp1252"
"""The encoding of Western Europe, which is taken wherever it may be the right one."""

_GUESSED = [
    _USUAL,
    *("cp1250", "cp1251", "cp1253", "cp1254", "cp1255", "cp1256", "cp1257", "koi8_r"),
    *("shift_jis", "cp932", "euc_jp", "gb18030", "big5", "euc_kr", "cp949"),
]
"""The encodings that files without a mark have in practice."""

_MOST_CHAOS = 0.15
"""The share of unlikely characters above which an encoding is rejected."""


class NoTextError(Exception):
    """The file has no text that could be cached; the message says why."""


@dataclass(frozen=True, slots=True)
class DocumentText:
    """The text of a file."""

    text: str

    encoding: str | None = None
    """The encoding that was guessed, by its name in Python; None for UTF-8, and for converted
    formats."""


def read_document(content: bytes, suffix: str) -> DocumentText:
    """Return the text of a file whose name ends in ``suffix``. For suffixes in ``FORMATS``, it is
    Markdown.

    Raises NoTextError, and MissingLibraryError if the format's converter is not installed.
    """
    if suffix.lower() in FORMATS:
        try:
            found = DocumentText(convert(content, suffix.lower()))
        except ValueError as error:
            raise NoTextError(str(error)) from error
    else:
        found = _decoded(content)
    if not found.text.strip():
        raise NoTextError("it is empty" if not content.strip() else "there is no text in it")
    return found


def _decoded(content: bytes) -> DocumentText:
    encoding = next((name for mark, name in _MARKS if content.startswith(mark)), "utf-8")
    binary = encoding == "utf-8" and b"\0" in content
    try:
        if not binary:
            return DocumentText(content.decode(encoding))
    except UnicodeDecodeError:
        matches = from_bytes(content, cp_isolation=_GUESSED, threshold=_MOST_CHAOS)
        usual = any(_USUAL in match.could_be_from_charset for match in matches)
        if (best := matches.best()) is not None:
            guessed = _USUAL if usual else best.encoding
            return DocumentText(content.decode(guessed), guessed)
    raise NoTextError("it is not text, or its encoding cannot be detected")
