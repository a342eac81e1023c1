"""``kvlinker ingest``: files become context caches ahead of time, in this process or through a running server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from kvlinker.cli.console import BAD_USAGE, FAILURE, fail, failures, warn
from kvlinker.cli.options import settings_options
from kvlinker.config import SHARED_TIER_SETTINGS, Settings
from kvlinker.errors import did_you_mean

BATCH = 16


class Cached(NamedTuple):
    """The id of one context cache of a file, and its length in tokens."""

    id: str
    tokens: int


class Batch(NamedTuple):
    """The context caches of a part of a text, and the part's length in characters."""

    caches: tuple[Cached, ...]
    characters: int


@dataclass(frozen=True)
class Job:
    """The settings of an ingestion: how texts are split, their context caches' time to live in seconds (None: for
    ever), and their owner."""

    method: str
    max_tokens: int
    ttl: float | None
    api_key: str | None


Cacher = Callable[[str, dict[str, Any]], Iterator[Batch]]
"""A function that splits and caches a text; its second argument has the name and metadata of the context caches."""


@settings_options(
    "model",
    "served_model_name",
    "engine",
    "dtype",
    "device",
    "trust_remote_code",
    "chat_template",
    "system_prompt",
    "generation_context",
    "max_model_len",
    "kv_slots",
    "max_step_tokens",
    "threads",
    "state_dir",
    "host_memory",
    "disk_space",
    *SHARED_TIER_SETTINGS,
)
def ingest(
    settings: Settings,
    paths: Annotated[list[Path], typer.Argument(exists=True, help="Files and folders.", metavar="PATH...")],
    glob: Annotated[str, typer.Option(help="Which files of folders.")] = "*",
    method: Annotated[
        str, typer.Option(help="What a chunk is: fixed, sentence, paragraph, passage, markdown, or what a plugin adds.")
    ] = "passage",
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of a chunk.")] = 512,
    ttl: Annotated[
        float | None, typer.Option(min=1, help="Seconds to keep the context caches; for ever by default.")
    ] = None,
    url: Annotated[str | None, typer.Option(help="A running server; without, the work is done here.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="KVLINKER_API_KEY", help="Whose context caches.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Split files and folders into chunks, and cache them ahead of time.

    Prints a line per context cache: id, tokens, file. Files that are not UTF-8 text are left out.
    """
    if url is None:
        _check_method(method)
    texts = list(_texts(paths, glob))
    if not texts:
        raise fail("there is no text in these files", FAILURE)
    job = Job(method, max_tokens, ttl, api_key)
    with failures(), _here(settings, job) if url is None else _there(url, job) as cacher:
        results = _ingest(texts, cacher)
    if as_json:
        entries = [{"file": str(file), "caches": [cache._asdict() for cache in caches]} for file, caches in results]
        typer.echo(json.dumps(entries, indent=2))
        return
    for file, caches in results:
        for cache in caches:
            typer.echo(f"{cache.id}  {cache.tokens:>6}  {file}")


def _check_method(method: str) -> None:
    """End the command for an unknown method before the model is loaded; a server knows its own."""
    from kvlinker.splitting import splitters

    if method not in (known := splitters()):
        allowed = f"it must be one of {', '.join(known)}.{did_you_mean(method, known)}"
        raise fail(f"--method is {method!r}: {allowed}", BAD_USAGE)


def _texts(paths: Sequence[Path], glob: str) -> Iterator[tuple[Path, str]]:
    for file in _files(paths, glob):
        try:
            text = _read_text(file)
        except OSError as error:
            warn(f"{file} is left out: {error.strerror}")
            continue
        if text is None:
            warn(f"{file} is left out: it is not UTF-8 text")
        elif not text.strip():
            warn(f"{file} is left out: it is empty")
        else:
            yield file, text


def _files(paths: Sequence[Path], glob: str) -> Iterator[Path]:
    """The files among ``paths``, and those in folders that match ``glob``; hidden ones in folders are left out."""
    found: dict[Path, None] = {}
    for path in paths:
        if path.is_file():
            found[path] = None
            continue
        for file in sorted(path.rglob(glob)):
            hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
            if file.is_file() and not hidden:
                found[file] = None
    yield from found


def _read_text(path: Path) -> str | None:
    """The file's text; None for a file that is binary or not in UTF-8. Raises OSError."""
    content = path.read_bytes()
    if b"\0" in content:
        return None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None


def _ingest(texts: Sequence[tuple[Path, str]], cacher: Cacher) -> list[tuple[Path, list[Cached]]]:
    results = []
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=sum(len(text) for _, text in texts))
        for file, text in texts:
            progress.update(task, description=file.name)
            caches: list[Cached] = []
            for batch in cacher(text, {"name": str(file)[-256:], "metadata": {"source": str(file)[-512:]}}):
                caches += batch.caches
                progress.advance(task, batch.characters)
            results.append((file, caches))
    return results


@contextmanager
def _here(settings: Settings, job: Job) -> Iterator[Cacher]:
    """Load the model, and work on the state directory."""
    with Console(stderr=True).status(f"Loading and checking {settings.model}"):
        from kvlinker.llm import LLM
        from kvlinker.types.tenants import DEFAULT_TENANT, tenant_of_key

        llm = LLM.from_settings(settings)
    tenant = DEFAULT_TENANT if job.api_key is None else tenant_of_key(job.api_key)

    def cache(text: str, labels: dict[str, Any]) -> Iterator[Batch]:
        pieces = llm.split(text, method=job.method, max_tokens=job.max_tokens)
        for start in range(0, len(pieces), BATCH):
            batch = pieces[start : start + BATCH]
            made = llm.generate_context_cache(batch, ttl=job.ttl, tenant=tenant, **labels)
            yield Batch(tuple(Cached(one.id, one.tokens) for one in made), sum(map(len, batch)))

    with llm:
        yield cache


@contextmanager
def _there(url: str, job: Job) -> Iterator[Cacher]:
    """Have a running server do it."""
    from kvlinker.client import Client

    with Client(url, job.api_key) as client:

        def cache(text: str, labels: dict[str, Any]) -> Iterator[Batch]:
            lifetime = {} if job.ttl is None else {"ttl": job.ttl}
            made = client.cache_text(text, method=job.method, max_tokens=job.max_tokens, **lifetime, **labels)
            yield Batch(tuple(Cached(one.id, one.tokens) for one in made), len(text))

        yield cache
