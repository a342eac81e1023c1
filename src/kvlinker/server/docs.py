"""GET /docs: a page that shows the OpenAPI document. It loads nothing from elsewhere."""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

router = APIRouter(tags=["status"])

_PAGE = files("kvlinker.server").joinpath("static/docs.html").read_text(encoding="utf-8")


@router.get("/docs", response_class=HTMLResponse)
async def docs() -> HTMLResponse:
    """Show people what /openapi.json says, as a page."""
    return HTMLResponse(_PAGE)
