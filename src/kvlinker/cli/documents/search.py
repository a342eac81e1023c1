"""``kvlinker search`` and ``kvlinker ask``: find cached chunks, and answer questions with them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Annotated

import typer

from kvlinker.base.errors import ContextLengthError
from kvlinker.base.types.tenants import DEFAULT_TENANT, tenant_of_key
from kvlinker.base.types.texts import SearchHit
from kvlinker.cli.console import BAD_USAGE, FAILURE, fail, failures
from kvlinker.cli.documents.library import MODEL_SETTINGS, CacheLibrary, open_library
from kvlinker.cli.options import ApiKey, MetadataPairs, Url, parse_pairs, settings_options
from kvlinker.engines.contract.model_place import check_model
from kvlinker.service.state import search_by_words
from kvlinker.settings import SHARED_TIER_SETTINGS, Settings

_SETTINGS = (*MODEL_SETTINGS, "disk_space", *SHARED_TIER_SETTINGS)

Limit = Annotated[int, typer.Option(min=1, max=100, help="Most chunks.")]


@settings_options(*_SETTINGS)
def search(
    settings: Settings,
    query: Annotated[str, typer.Argument(help="Words; any of them may match.", metavar="QUERY")],
    limit: Limit = 10,
    metadata: MetadataPairs = None,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a line of JSON per chunk.")
    ] = False,
) -> None:
    """Find cached chunks by words of their texts, the best match first; with --embedding-model also
    by what they mean.

    Behind a chunk's id stands how well it matches, in percent of the best match; --json has the
    score itself. The exit code is 1 if nothing is found.
    """
    pairs = parse_pairs(metadata)
    _check_words(query, "QUERY")
    hits: Sequence[SearchHit] | None = None
    with failures():
        if url is None:
            check_model(settings)
            tenant = DEFAULT_TENANT if api_key is None else tenant_of_key(api_key)
            hits = search_by_words(settings, query, tenant=tenant, limit=limit, metadata=pairs)
        if hits is None:
            with open_library(settings, url=url, api_key=api_key) as library:
                hits = library.search(query, limit=limit, metadata=pairs)
    if not hits:
        raise _nothing_found(query)
    best = hits[0].score
    for hit in hits:
        if as_json:
            entry = {"id": hit.id, "score": hit.score, "text": hit.text, "tokens": hit.tokens}
            typer.echo(json.dumps({**entry, "metadata": dict(hit.metadata)}, ensure_ascii=False))
        else:
            typer.echo(f"{hit.id}  {_share(hit.score / best):>4}  {_place(hit)}".rstrip())
            typer.echo(f"{_indented(hit.text)}\n")


@settings_options(*_SETTINGS, "policy")
def ask(
    settings: Settings,
    question: Annotated[
        str, typer.Argument(help="A question about what is cached.", metavar="QUESTION")
    ],
    limit: Limit = 4,
    metadata: MetadataPairs = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of the answer.")] = 256,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Answer a question with the cached chunks that match it best.

    Prints the answer; the chunks that the model read are named on stderr.
    """
    pairs = parse_pairs(metadata)
    _check_words(question, "QUESTION")
    policy = settings.policy if url is None or "policy" in settings.model_fields_set else None
    with failures(), open_library(settings, url=url, api_key=api_key) as library:
        hits = library.search(question, limit=limit, metadata=pairs)
        if not hits:
            raise _nothing_found(question)
        answer, read = _answer(library, question, hits, policy, max_tokens)
    for hit in read:
        place = f" of {where}" if (where := _place(hit)) else ""
        typer.echo(f"kvlinker: read {hit.id} ({hit.tokens} tokens){place}", err=True)
    typer.echo(answer.strip())


def _answer(
    library: CacheLibrary,
    question: str,
    hits: Sequence[SearchHit],
    policy: str | None,
    max_tokens: int,
) -> tuple[str, Sequence[SearchHit]]:
    """Return the answer, and the hits that the model read: as many of the best as its context
    window has room for.

    Raises ContextLengthError if not even one has room.
    """
    while True:
        try:
            return (
                library.answer(message_of(hits, question), policy=policy, max_tokens=max_tokens),
                hits,
            )
        except ContextLengthError:
            if len(hits) == 1:
                raise
            hits = hits[:-1]


def message_of(hits: Sequence[SearchHit], question: str) -> list[SearchHit | str]:
    """Make a message of chunks, each of which ends its line, the best next to the question."""
    content: list[SearchHit | str] = []
    for hit in reversed(hits):
        content += [hit] if hit.text.endswith("\n") else [hit, "\n"]
    return [*content, f"Question: {question}"]


def _share(share: float) -> str:
    """Write a share in whole percent. None is 0%: a word that most texts have counts for next to
    nothing in BM25, by which SQLite ranks."""
    return f"{share:.0%}" if share >= 0.005 else "<1%"


def _check_words(text: str, argument: str) -> None:
    """End the command where there is nothing to search for, before a model is loaded."""
    if not re.search(r"\w", text):
        raise fail(
            f"{argument} is {text!r}, without a word to search for; write some, such as 'Who lives"
            " in Oslo?'",
            BAD_USAGE,
        )


def _nothing_found(query: str) -> typer.Exit:
    return fail(
        f"nothing that is cached matches {query!r}; `kvlinker ingest PATH` caches files", FAILURE
    )


def _place(hit: SearchHit) -> str:
    """Name the part of a file, or the metadata, of a chunk; empty if it has none."""
    labels = hit.metadata
    if "source" in labels and "start" in labels and "end" in labels:
        return f"{labels['source']}, characters {labels['start']} to {labels['end']}"
    return labels.get("source") or (json.dumps(dict(labels), ensure_ascii=False) if labels else "")


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.strip().splitlines())
