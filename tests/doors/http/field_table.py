"""Writes the table of fields in ``docs/api.md`` from what bodies check themselves by.

Run ``python -m tests.doors.http.field_table docs/api.md`` after a change.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from kvlinker.doors.http.answers.chat import ChatCompletionRequest
from kvlinker.doors.http.answers.completions import CompletionRequest
from kvlinker.doors.http.embeddings import EmbeddingsRequest
from kvlinker.doors.http.fields.bodies import RequestBody
from kvlinker.doors.http.fields.foreign import (
    ANSWERS,
    FIELDS,
    ForeignFields,
    Place,
)
from kvlinker.doors.http.messages.requests import CountTokensRequest, MessagesRequest
from kvlinker.doors.http.responses.requests import ResponsesRequest
from kvlinker.doors.http.tokenize import DetokenizeRequest, TokenizeRequest

BODIES: Mapping[Place, type[RequestBody]] = {
    Place.CHAT: ChatCompletionRequest,
    Place.COMPLETIONS: CompletionRequest,
    Place.RESPONSES: ResponsesRequest,
    Place.MESSAGES: MessagesRequest,
    Place.COUNT_TOKENS: CountTokensRequest,
    Place.TOKENIZE: TokenizeRequest,
    Place.DETOKENIZE: DetokenizeRequest,
    Place.EMBEDDINGS: EmbeddingsRequest,
}
"""The bodies of the routes that other servers have, too."""

BEGIN, END = "<!-- fields -->\n", "<!-- end of fields -->\n"
"""Stand around the table on its page."""

_HEAD = "| fields | where | what happens |\n|---|---|---|\n"


def field_table() -> str:
    """Return the table in Markdown: a row for all fields that are taken alike at the same places,
    those that mean nothing first, and those that are refused last."""
    rows: dict[tuple[str, str], list[str]] = {}
    for fields in sorted(FIELDS, key=lambda each: (each.refused, each.no_ops is not None)):
        rows.setdefault((_list(fields.places), _taken(fields)), []).extend(fields.names)
    return _HEAD + "".join(
        f"| {_names(names)} | {where} | {taken} |\n" for (where, taken), names in rows.items()
    )


def with_table(page: str) -> str:
    """Return a page with the table as it is now. Raises ValueError for one without its marks."""
    before, _, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"The page has no {BEGIN.strip()} and {END.strip()} around a table.")
    return f"{before}{BEGIN}\n{field_table()}\n{end}{after}"


def _taken(fields: ForeignFields) -> str:
    if fields.no_ops is None:
        return "nothing"
    happens = "refused" if fields.refused else "left out, and named"
    values = " or ".join(f"`{json.dumps(value)}`" for value in fields.no_ops)
    return f"{happens}, but for {values}" if values else happens


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _list(places: Collection[Place]) -> str:
    """Name places in the order of ``Place``, and those of all answers by one word."""
    rest = [place for place in Place if place in places]
    if ANSWERS.issubset(places):
        return ", ".join(["answers", *(place for place in rest if place not in ANSWERS)])
    return ", ".join(rest)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_table(path.read_text(encoding="utf-8")), encoding="utf-8")
