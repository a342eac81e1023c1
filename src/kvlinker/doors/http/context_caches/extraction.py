"""/v1/context_caches/extract: the text of a file, as it would be cached."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import PurePath
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request

from kvlinker.base.errors import InvalidRequestError
from kvlinker.doors.http.edge.errors import error_responses
from kvlinker.doors.http.fields.bodies import ResponseBody
from kvlinker.doors.http.models import ServedModelParam
from kvlinker.prompting.documents import CONVERTERS, NoTextError, read_document

router = APIRouter(prefix="/v1/context_caches", tags=["context caches"])

CONVERSION_SECONDS = 120.0
"""The longest time that a file may take to be converted."""

_BODY = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}


class ExtractedText(ResponseBody):
    """The text of a file, which is Markdown where it was converted.

    ``encoding`` is the one that was guessed, null for UTF-8 and for converted files; ``digest`` is
    the SHA-256 of the file's content.
    """

    object: Literal["context_cache.extracted_text"] = "context_cache.extracted_text"
    text: str
    encoding: str | None
    digest: str


@router.post("/extract", openapi_extra=_BODY, responses=error_responses(400))
async def extract_text(
    request: Request, served: ServedModelParam, name: Annotated[str, Query(max_length=4096)]
) -> ExtractedText:
    """Extract the text of a file, which is the body: decoded from its encoding, or converted from
    PDF, HTML, DOCX or EPUB, by the end of ``name``. Nothing is cached."""
    content = await request.body()
    suffix = PurePath(name).suffix.lower()
    told = await served.encoding.run_long(lambda: _text_of(content, suffix))
    return ExtractedText(**told, digest=hashlib.sha256(content).hexdigest())


def _text_of(content: bytes, suffix: str) -> dict[str, Any]:
    """Return text and encoding. Raises InvalidRequestError, which says why there is no text."""
    if suffix in CONVERTERS:
        told = _converted(content, suffix)
    else:
        try:
            found = read_document(content, suffix)
            told = {"text": found.text, "encoding": found.encoding}
        except NoTextError as error:
            told = {"no_text": str(error)}
    if "no_text" in told:
        raise InvalidRequestError(f"There is no text to cache: {told['no_text']}.", code="no_text")
    return told


def _converted(content: bytes, suffix: str) -> dict[str, Any]:
    """Convert in a process of its own, which a file that takes for ever, or all memory, does not
    outlive."""
    command = [sys.executable, "-m", "kvlinker.prompting.documents", suffix]
    try:
        ran = subprocess.run(
            command, input=content, capture_output=True, timeout=CONVERSION_SECONDS, check=True
        )
    except subprocess.TimeoutExpired:
        return {"no_text": f"it takes more than {CONVERSION_SECONDS:.0f} s to be read"}
    except subprocess.CalledProcessError:
        return {"no_text": "it takes too much memory to be read"}
    told: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return told
