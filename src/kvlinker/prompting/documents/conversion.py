"""Converts PDF, HTML, DOCX and EPUB to Markdown with markitdown, which the extra ``documents``
installs."""

from __future__ import annotations

import io
import logging
from typing import Any

FORMATS = {
    ".pdf": "PdfConverter",
    ".html": "HtmlConverter",
    ".htm": "HtmlConverter",
    ".xhtml": "HtmlConverter",
    ".docx": "DocxConverter",
    ".epub": "EpubConverter",
}
"""The markitdown converter of each file name's end."""


class MissingLibraryError(Exception):
    """The converter is not installed; the message says how to install it."""


def convert(content: bytes, suffix: str) -> str:
    """Return a file's text as Markdown; ``suffix`` is one of ``FORMATS``.

    Raises ValueError for a file that is damaged or encrypted, and MissingLibraryError.
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
        raise ValueError(
            f"it cannot be read as {suffix[1:].upper()}: {_first_line(error)}"
        ) from error
    return str(result.markdown)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0] or type(error).__name__
