"""/v1/context_caches/extract: texts of files, whatever they are."""

from __future__ import annotations

import hashlib
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest

from kvlinker.doors.http.context_caches import extraction
from tests.doors.http.serving import Served


def extract(served: Served, name: str, content: bytes) -> httpx.Response:
    headers = {"Content-Type": "application/octet-stream"}
    path = f"/v1/context_caches/extract?name={quote(name)}"
    return served.http.post(path, content=content, headers=headers)


@pytest.mark.parametrize(
    ("content", "encoding"), [("Käse".encode(), None), ("Käse".encode("cp1252"), "cp1252")]
)
def test_texts_are_decoded(served: Served, content: bytes, encoding: str | None) -> None:
    assert extract(served, "ä/b.txt", content).json() == {
        "object": "context_cache.extracted_text",
        "text": "Käse",
        "encoding": encoding,
        "digest": hashlib.sha256(content).hexdigest(),
    }


@pytest.mark.parametrize(("content", "words"), [(b"", "it is empty"), (b"a\0b", "it is not text")])
def test_files_without_text_say_why(served: Served, content: bytes, words: str) -> None:
    answer = extract(served, "a.txt", content)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "no_text")
    assert words in answer.json()["error"]["message"]


@pytest.fixture
def converter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module in the place of markitdown, which a test writes."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "markitdown").mkdir()
    return tmp_path / "markitdown" / "__init__.py"


CONVERTER = """
import types
class StreamInfo:
    def __init__(self, extension): pass
class PdfConverter:
    def convert(self, stream, info):
        {body}
converters = types.SimpleNamespace(PdfConverter=PdfConverter)
"""


def test_documents_are_converted_apart(served: Served, converter: Path) -> None:
    body = "return types.SimpleNamespace(markdown='# ' + stream.read().decode())"
    converter.write_text(CONVERTER.format(body=body))
    assert extract(served, "A.PDF", b"Tom").json()["text"] == "# Tom"


def test_without_the_converter_it_says_what_to_install(served: Served, converter: Path) -> None:
    converter.write_text("raise ModuleNotFoundError('no')")
    answer = extract(served, "a.pdf", b"%PDF")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "converter_missing")
    assert "pip install 'kvlinker[documents]'" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise ValueError('broken')", "it cannot be read as PDF: broken"),
        ("import time; time.sleep(600)", "takes more than"),
        ("bytearray(2**40)", "it cannot be read as PDF"),
        ("import os; os.abort()", "too much memory"),
    ],
)
def test_documents_that_break_the_converter(
    served: Served, converter: Path, monkeypatch: pytest.MonkeyPatch, body: str, words: str
) -> None:
    seconds = 0.5 if "sleep" in body else 60.0
    monkeypatch.setattr(extraction, "CONVERSION_SECONDS", seconds)
    converter.write_text(CONVERTER.format(body=body))
    answer = extract(served, "a.pdf", b"%PDF")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "no_text")
    assert words in answer.json()["error"]["message"]
