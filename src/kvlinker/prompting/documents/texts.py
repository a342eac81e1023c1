"""Extracts the text of a file: converts PDF, HTML, DOCX and EPUB to Markdown, and guesses the
encoding of others."""

from __future__ import annotations

import codecs
import io
from dataclasses import dataclass

from charset_normalizer import from_bytes

from kvlinker.prompting.documents.converters import CONVERTERS

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
    """Return the text of a file whose name ends in ``suffix``; it is Markdown for suffixes in
    ``CONVERTERS``. Raises NoTextError."""
    if suffix.lower() in CONVERTERS:
        found = DocumentText(_converted(content, suffix.lower()))
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


def _converted(content: bytes, suffix: str) -> str:
    """Return a file's text as Markdown; ``suffix`` is one of ``CONVERTERS``. Raises NoTextError for
    a file that is damaged or encrypted."""
    try:
        return CONVERTERS[suffix](io.BytesIO(content))
    except Exception as error:  # whatever a parser trips over
        raise NoTextError(
            f"it cannot be read as {suffix[1:].upper()}: {_first_line(error)}"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0] or type(error).__name__
