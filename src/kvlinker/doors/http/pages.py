"""The pages for people, / and /docs, and the files that they are made of; nothing is loaded from
elsewhere."""

from __future__ import annotations

from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import PurePosixPath

from fastapi import APIRouter, HTTPException, Response
from fastapi.responses import HTMLResponse

router = APIRouter(tags=["status"])

_MEDIA_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".mjs": "text/javascript",
}
"""The types of files by their endings; others, which are licences, are plain text."""

_FOLDER = files("kvlinker.doors.http").joinpath("static")


def _texts(folder: Traversable, below: str = "") -> dict[str, str]:
    """Return the texts of all files in a folder, and in those below it, by their paths."""
    found: dict[str, str] = {}
    for entry in folder.iterdir():
        path = f"{below}{entry.name}"
        if entry.is_dir():
            found |= _texts(entry, f"{path}/")
        else:
            found[path] = entry.read_text(encoding="utf-8")
    return found


_TEXTS = _texts(_FOLDER)

PAGE_PATHS = frozenset({"/", "/docs", *(f"/static/{path}" for path in _TEXTS)})
"""The paths of all pages and their files, which hold no data of anybody's."""

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
"""Lets a page load and call this server alone, run no script that stands in its text, turn no text
into markup or a script, and stand in no other page."""

_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@router.get("/", response_class=HTMLResponse)
async def page() -> Response:
    """Show a page for people: documents, a conversation about them, its reuse, and the server's
    state."""
    return _file("index.html")


@router.get("/docs", response_class=HTMLResponse)
async def docs() -> Response:
    """Show /openapi.json as a page for people."""
    return _file("docs.html")


@router.get("/static/{path:path}", include_in_schema=False)
async def page_file(path: str) -> Response:
    """Return a file of a page."""
    if path not in _TEXTS:
        raise HTTPException(404, f"There is no file {path!r}.")
    return _file(path)


def _file(name: str) -> Response:
    media_type = _MEDIA_TYPES.get(PurePosixPath(name).suffix, "text/plain")
    return Response(_TEXTS[name], media_type=f"{media_type}; charset=utf-8", headers=_HEADERS)
