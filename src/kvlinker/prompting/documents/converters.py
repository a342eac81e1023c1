"""Converts files of formats that are no plain text to Markdown. Each library is imported when the
first file of its format comes."""

from __future__ import annotations

import io
import posixpath
import zipfile
from collections.abc import Iterator
from typing import IO, Any
from urllib.parse import unquote
from xml.etree import ElementTree

CONTAINER = "META-INF/container.xml"
"""The file of an EPUB that names its package, whose spine lists the chapters in order."""

BESIDES_TEXT = ("script", "style", "template", "noscript")


def read_html(file: IO[bytes]) -> str:
    """Return a page's text as Markdown: of its body, without scripts, styles and pictures that are
    written into it."""
    from bs4 import BeautifulSoup
    from markdownify import ATX, MarkdownConverter

    page = BeautifulSoup(file, "html.parser")
    for element in page(BESIDES_TEXT):
        element.decompose()
    for picture in page("img", src=lambda source: bool(source) and source.startswith("data:")):
        picture.decompose()
    try:
        text: str = MarkdownConverter(heading_style=ATX).convert_soup(page.body or page)
    except RecursionError:  # elements in elements, a thousand deep
        text = (page.body or page).get_text("\n", strip=True)
    return text.strip()


def read_pdf(file: IO[bytes]) -> str:
    """Return a PDF's text, page by page."""
    import logging

    from pdfminer.high_level import extract_text

    logging.getLogger("pdfminer").setLevel(logging.ERROR)  # it warns of every odd font
    return str(extract_text(file)).replace("\f", "\n\n").strip()


def read_docx(file: IO[bytes]) -> str:
    """Return a Word document's text as Markdown, without its pictures."""
    import mammoth

    def no_picture(_: Any) -> list[Any]:
        return []

    html = mammoth.convert_to_html(file, convert_image=no_picture).value
    return read_html(io.BytesIO(html.encode()))


def read_epub(file: IO[bytes]) -> str:
    """Return a book's title and chapters as Markdown, in the order in which they are read."""
    with zipfile.ZipFile(file) as book:
        texts = [read_html(book.open(name)) for name in _chapters(book)]
        title = _root(book, _package(book)).findtext(".//{*}metadata/{*}title")
    return "\n\n".join(filter(None, [title and f"# {title}", *texts]))


def _package(book: zipfile.ZipFile) -> str:
    """Return the name of a book's package. Raises ValueError where there is none."""
    found = _root(book, CONTAINER).find(".//{*}rootfile")
    if found is None:
        raise ValueError(f"{CONTAINER} names no package")
    return found.attrib["full-path"]


def _chapters(book: zipfile.ZipFile) -> Iterator[str]:
    """Yield the names of the files that a book's spine lists."""
    place = _package(book)
    package = _root(book, place)
    names = {item.attrib["id"]: item.attrib["href"] for item in package.iterfind(".//{*}item")}
    there = set(book.namelist())
    for reference in package.iterfind(".//{*}itemref"):
        written = names.get(reference.attrib["idref"], "")
        for name in (unquote(written), written):  # some archives have the name as it is written
            path = posixpath.normpath(posixpath.join(posixpath.dirname(place), name))
            if path in there:
                yield path
                break


def _root(book: zipfile.ZipFile, name: str) -> ElementTree.Element:
    return ElementTree.fromstring(book.read(name))


CONVERTERS = {
    ".pdf": read_pdf,
    ".html": read_html,
    ".htm": read_html,
    ".xhtml": read_html,
    ".docx": read_docx,
    ".epub": read_epub,
}
"""The function that reads the files with each end of a name. Raises whatever its parser raises for
files that are damaged or encrypted."""
