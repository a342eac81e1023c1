"""The pages for people, / and /docs, and the files that they are made of; nothing is loaded from
elsewhere."""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter, HTTPException, Response
from fastapi.responses import HTMLResponse

router = APIRouter(tags=["status"])

_MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}

_FOLDER = files("kvlinker.doors.http").joinpath("static")
_TEXTS = {
    file.name: file.read_text(encoding="utf-8") for file in _FOLDER.iterdir() if file.is_file()
}

PAGE_PATHS = frozenset({"/", "/docs", *(f"/static/{name}" for name in _TEXTS)})
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
    )
)
"""Lets a page load and call this server alone, run no script that stands in its text, and stand in
no other page."""

_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@router.get("/", response_class=HTMLResponse)
async def page() -> Response:
    """Show a page for people: documents, a conversation about them, what was reused, and how the
    server is doing."""
    return _file("index.html")


@router.get("/docs", response_class=HTMLResponse)
async def docs() -> Response:
    """Show a page for people that tells what /openapi.json says."""
    return _file("docs.html")


@router.get("/static/{name}", include_in_schema=False)
async def page_file(name: str) -> Response:
    """Return a file of a page."""
    if name not in _TEXTS:
        raise HTTPException(404, f"There is no file {name!r}.")
    return _file(name)


def _file(name: str) -> Response:
    media_type = _MEDIA_TYPES[name[name.rindex(".") :]]
    return Response(_TEXTS[name], media_type=f"{media_type}; charset=utf-8", headers=_HEADERS)
