"""/v1/context_caches/extract: texts of files, whatever they are."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest

from kvlinker.doors.http.context_caches import texts
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
    """A module in the place of pdfminer's, which a test writes."""
    others = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), others])))
    (tmp_path / "pdfminer").mkdir()
    (tmp_path / "pdfminer" / "__init__.py").touch()
    return tmp_path / "pdfminer" / "high_level.py"


CONVERTER = """
def extract_text(file):
    {body}
"""


def test_documents_are_converted_apart(served: Served, converter: Path) -> None:
    converter.write_text(CONVERTER.format(body="return '# ' + file.read().decode()"))
    assert extract(served, "A.PDF", b"Tom").json()["text"] == "# Tom"


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
    monkeypatch.setattr(texts, "CONVERSION_SECONDS", seconds)
    converter.write_text(CONVERTER.format(body=body))
    answer = extract(served, "a.pdf", b"%PDF")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "no_text")
    assert words in answer.json()["error"]["message"]
