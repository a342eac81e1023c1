"""Texts of PDF, HTML, DOCX and EPUB files, and of others in any encoding."""

from __future__ import annotations

import io
import zipfile
from itertools import product
from pathlib import PurePath

import pytest

from kvlinker.prompting.documents import NoTextError, read_document

WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
PACKAGE = "http://schemas.openxmlformats.org/package/2006"
OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006"


def archive(members: dict[str, str]) -> bytes:
    """A ZIP file."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, content in members.items():
            file.writestr(name, content)
    return buffer.getvalue()


def pdf(*lines: str) -> bytes:
    """A PDF of one page."""
    drawn = "".join(f"({line}) Tj 0 -20 Td " for line in lines)
    stream = f"BT /F1 12 Tf 72 720 Td {drawn}ET"
    objects = (
        "<< /Type /Catalog /Pages 2 0 R >>",
        "<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        (
            "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R"
            " /Resources << /Font << /F1 5 0 R >> >> >>"
        ),
        f"<< /Length {len(stream)} >>\nstream\n{stream}\nendstream",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    )
    content, places = "%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        places.append(len(content))
        content += f"{number} 0 obj\n{body}\nendobj\n"
    table = "".join(f"{place:010} 00000 n \n" for place in places)
    trailer = f"trailer\n<< /Size 6 /Root 1 0 R >>\nstartxref\n{len(content)}\n%%EOF\n"
    return (content + f"xref\n0 6\n0000000000 65535 f \n{table}{trailer}").encode()


def docx(*paragraphs: str) -> bytes:
    body = "".join(f"<w:p><w:r><w:t>{text}</w:t></w:r></w:p>" for text in paragraphs)
    return archive(
        {
            "[Content_Types].xml": (
                f'<Types xmlns="{PACKAGE}/content-types"><Default Extension="rels" ContentType='
                '"application/vnd.openxmlformats-package.relationships+xml"/><Override'
                ' PartName="/word/document.xml" '
                'ContentType="application/vnd.openxmlformats-officedocument.wordprocessingml.document.main+xml"/></Types>'
            ),
            "_rels/.rels": (
                f'<Relationships xmlns="{PACKAGE}/relationships"><Relationship Id="r1"'
                f' Type="{OFFICE}/relationships/officeDocument"'
                ' Target="word/document.xml"/></Relationships>'
            ),
            "word/document.xml": (
                f'<w:document xmlns:w="{WORD}"><w:body>{body}</w:body></w:document>'
            ),
        }
    )


def epub(title: str, *chapters: str) -> bytes:
    names = [f"c{number}.xhtml" for number in range(len(chapters))]
    items = "".join(
        f'<item id="{name}" href="{name}" media-type="application/xhtml+xml"/>' for name in names
    )
    spine = "".join(f'<itemref idref="{name}"/>' for name in names)
    return archive(
        {
            "META-INF/container.xml": (
                "<container"
                ' xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles><rootfile'
                ' full-path="book.opf"'
                ' media-type="application/oebps-package+xml"/></rootfiles></container>'
            ),
            "book.opf": (
                '<package xmlns="http://www.idpf.org/2007/opf" version="3.0"><metadata xmlns:dc='
                f'"http://purl.org/dc/elements/1.1/"><dc:title>{title}</dc:title></metadata>'
                f"<manifest>{items}</manifest><spine>{spine}</spine></package>"
            ),
        }
        | {
            name: f"<html><body>{text}</body></html>"
            for name, text in zip(names, chapters, strict=True)
        }
    )


HTML = """<html><head><title>t</title><style>p {color: red}</style></head>
<body><h1>Tom Reyes</h1><p>lives in <b>Oslo</b>, Ærø &amp; Lima</p>
<script>alert(1)</script></body></html>"""


def text_of(name: str, content: bytes) -> str:
    return read_document(content, PurePath(name).suffix).text


def test_html() -> None:
    for name in ("page.html", "PAGE.HTM"):
        assert text_of(name, HTML.encode()) == "# Tom Reyes\n\nlives in **Oslo**, Ærø & Lima"


def test_pictures_in_a_page_are_no_text() -> None:
    page = '<p>Tom</p><img src="data:image/png;base64,iVBORw0KGgo="><img alt="Oslo" src="o.png">'
    assert text_of("page.html", page.encode()) == "Tom\n\n![Oslo](o.png)"


def test_elements_in_elements_without_end() -> None:
    page = f"{'<div>' * 3000}Tom lives in Oslo.{'</div>' * 3000}"
    assert text_of("page.html", page.encode()) == "Tom lives in Oslo."


def test_tables_are_kept() -> None:
    page = "<table><tr><th>name</th><th>town</th></tr><tr><td>Tom</td><td>Oslo</td></tr></table>"
    assert text_of("page.html", page.encode()) == "| name | town |\n| --- | --- |\n| Tom | Oslo |"


def test_pdf() -> None:
    text = text_of("page.pdf", pdf("Tom Reyes lives in Oslo.", "He works as a pilot."))
    assert "Tom Reyes lives in Oslo." in text
    assert "He works as a pilot." in text


def test_docx() -> None:
    assert (
        text_of("a.docx", docx("Tom Reyes lives in Oslo.", "He flies."))
        == "Tom Reyes lives in Oslo.\n\nHe flies."
    )


def test_epub() -> None:
    text = text_of(
        "a.epub",
        epub("People", "<h1>One</h1><p>Tom lives in Oslo.</p>", "<h1>Two</h1><p>Mira bakes.</p>"),
    )
    assert text.index("# One\n\nTom lives in Oslo.") < text.index("# Two\n\nMira bakes.")


def test_damaged(subtests: pytest.Subtests) -> None:
    """Never taken for text, whatever is in it."""
    contents = (b"", b"PK\3\4 and no more", b"%PDF-1.4 and no more", "Tom Reyes".encode("utf-16"))
    for suffix, content in product((".pdf", ".docx", ".epub"), contents):
        with (
            subtests.test(suffix, content=content),
            pytest.raises(
                NoTextError,
                match=rf"cannot be read as {suffix[1:].upper()}|it is empty|no text in it",
            ),
        ):
            text_of(f"a{suffix}", content)


def test_pages_without_text() -> None:
    """As scans have them."""
    with pytest.raises(NoTextError, match="there is no text in it"):
        text_of("scan.pdf", pdf())


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it is empty"),
        (b" \n", "it is empty"),
        (b"a\0b", "it is not text"),
        (b"\x89PNG\r\n" + bytes(range(1, 256)), "it is not text"),
    ],
)
def test_files_without_text(content: bytes, reason: str) -> None:
    with pytest.raises(NoTextError, match=reason):
        text_of("a.txt", content)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_byte_order_mark_is_no_text(encoding: str) -> None:
    assert text_of("a.txt", "Ærø".encode(encoding)) == "Ærø"


ENCODED = [
    ("Käse", "cp1252"),
    ("Noël à Besançon était très chaud; le garçon a mangé du pâté.", "cp1252"),
    ("Zażółć gęślą jaźń. Mira mieszka w Warnie i pracuje jako piekarz.", "cp1250"),
    ("Мира живет в Варне, она работает пекарем. Том живет в Осло.", "cp1251"),
    ("Η Μίρα ζει στη Βάρνα και εργάζεται ως αρτοποιός.", "cp1253"),
    ("ミラはヴァルナに住んでいます。彼女はパン屋です。", "cp932"),
]


def test_encodings_are_guessed(subtests: pytest.Subtests) -> None:
    for text, encoding in ENCODED:
        with subtests.test(encoding, text=text):
            found = read_document(text.encode(encoding), ".txt")
            assert (found.text, found.encoding) == (text, encoding)


def test_utf8_is_no_guess() -> None:
    assert read_document("Käse".encode(), ".txt").encoding is None
