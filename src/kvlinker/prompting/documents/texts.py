"""Extracts the text of a file: converts PDF, HTML, DOCX and EPUB to Markdown with markitdown, which
the extra ``documents`` installs, and guesses the encoding of others."""

from __future__ import annotations

import codecs
import io
import logging
from dataclasses import dataclass
from typing import Any

from charset_normalizer import from_bytes

FORMATS = {
    ".pdf": "PdfConverter",
    ".html": "HtmlConverter",
    ".htm": "HtmlConverter",
    ".xhtml": "HtmlConverter",
    ".docx": "DocxConverter",
    ".epub": "EpubConverter",
}
"""The markitdown converter of each file name's end."""

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


class MissingLibraryError(Exception):
    """The converter is not installed; the message says how to install it."""


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
    """Return a file's text as Markdown; ``suffix`` is one of ``FORMATS``.

    Raises NoTextError for a file that is damaged or encrypted, and MissingLibraryError.
    """
    try:
        from markitdown import StreamInfo, converters
    except ModuleNotFoundError as error:
        raise MissingLibraryError(
            f"{suffix} files need a converter that is not installed: pip install"
            " 'kvlinker[documents]'"
        ) from error
    logging.getLogger("pdfminer").setLevel(logging.ERROR)  # it warns of every odd font
    converter = getattr(converters, FORMATS[suffix])()
    try:
        result: Any = converter.convert(io.BytesIO(content), StreamInfo(extension=suffix))
    except Exception as error:  # whatever a parser trips over
        raise NoTextError(
            f"it cannot be read as {suffix[1:].upper()}: {_first_line(error)}"
        ) from error
    return str(result.markdown)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0] or type(error).__name__
