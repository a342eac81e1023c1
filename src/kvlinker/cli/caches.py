"""kvlinker caches: what is stored, without a model: catalog and chunk files of the state directory."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvlinker.cli.failures import BAD_USAGE, FAILURE, fail, failures
from kvlinker.cli.options import settings_options
from kvlinker.config import SHARED_TIER_SETTINGS, Settings

if TYPE_CHECKING:
    from kvlinker.store import Catalog, ChunkStore, ContextCache

app = typer.Typer(help="List, remove and check what is stored.", no_args_is_help=True)

_SETTINGS = ("state_dir", "disk_space", *SHARED_TIER_SETTINGS)
_PAGE = 100
_UNLIMITED = 10_000


@app.command("ls")
@settings_options(*_SETTINGS)
def list_caches(settings: Settings) -> None:
    """List the context caches of all tenants, newest first."""
    with _opened(settings) as (catalog, store):
        table = Table(box=None, pad_edge=False)
        table.add_column("id", no_wrap=True)
        for title in ("name", "tenant"):
            table.add_column(title)
        for title in ("tokens", "bytes"):
            table.add_column(title, justify="right")
        for title in ("tier", "created", "expires"):
            table.add_column(title)
        for cache in _all(catalog):
            table.add_row(
                cache.id,
                cache.name or "-",
                cache.tenant,
                str(cache.tokens),
                str(store.nbytes(cache.chunk_key) or 0),
                store.tier_of(cache.chunk_key) or "-",
                _moment(cache.created_at),
                "never" if cache.expires_at is None else _moment(cache.expires_at),
            )
        Console(highlight=False, width=None if sys.stdout.isatty() else _UNLIMITED).print(table)


@app.command("rm")
@settings_options(*_SETTINGS)
def remove_caches(
    settings: Settings,
    ids: Annotated[list[str] | None, typer.Argument(help="Ids of context caches.", metavar="ID...")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove the context caches of all tenants.")] = False,
) -> None:
    """Remove context caches, with the KV that no other holds."""
    if bool(ids) == everything:
        raise fail("name the ids of context caches, or --all", BAD_USAGE)
    with _opened(settings) as (catalog, store):
        known = {cache.id: cache for cache in _all(catalog)}
        wanted = list(known) if everything else list(dict.fromkeys(ids or ()))
        missing = [cache_id for cache_id in wanted if cache_id not in known]
        for cache_id in wanted:
            if cache_id in known:
                for key in catalog.delete(cache_id, known[cache_id].tenant, time.time()):
                    store.delete(key)
        typer.echo(f"{len(wanted) - len(missing)} removed")
        if missing:
            raise fail(f"no such context caches: {', '.join(missing)}", FAILURE)


@app.command("check")
@settings_options(*_SETTINGS)
def check_caches(
    settings: Settings,
    repair: Annotated[bool, typer.Option("--repair", help="Remove KV that no context cache holds.")] = False,
) -> None:
    """Verify every stored file against its checksums and the catalog.

    Damaged copies are removed: their KV is computed again when it is used. In tiers that servers share, KV that
    this catalog does not hold is left to the other servers. The exit code is 1 when anything was wrong,
    repaired or not, else 0.
    """
    with _opened(settings) as (catalog, store):
        damaged = 0
        for tier in store.check():
            typer.echo(f"{tier.name}: {tier.checked} checked, {len(tier.damaged)} damaged")
            for copy in tier.damaged:
                typer.echo(f"  {copy.key}: {copy.reason}; removed")
            damaged += len(tier.damaged)
        held = catalog.chunk_keys().keys()
        orphans = sorted(store.own_keys() - held)
        for key in orphans:
            if repair:
                store.delete(key)
            typer.echo(f"  {key}: no context cache holds it; {'removed' if repair else '--repair removes it'}")
        absent = len(held - store.keys())
        typer.echo(f"{len(held)} chunks in the catalog: {absent} without KV (computed again when used)")
        typer.echo(f"{len(orphans)} orphans")
        if damaged or orphans:
            raise typer.Exit(FAILURE)


@contextmanager
def _opened(settings: Settings) -> Iterator[tuple[Catalog, ChunkStore]]:
    """Catalog and store of a state directory that exists."""
    from kvlinker.events import Events
    from kvlinker.store import Catalog, open_store
    from kvlinker.store.remote import shared_tiers

    events = Events()
    path = settings.state_dir / "catalog.sqlite"
    if not path.is_file():
        raise fail(f"nothing is stored in {settings.state_dir}", FAILURE)
    with (
        failures(),
        closing(Catalog(path)) as catalog,
        closing(
            open_store(
                settings.state_dir / "chunks",
                host_bytes=0,
                disk_bytes=settings.disk_space,
                events=events,
                shared=shared_tiers(settings, events),
            )
        ) as store,
    ):
        yield catalog, store


def _all(catalog: Catalog) -> Iterator[ContextCache]:
    now = time.time()
    for tenant in catalog.tenants():
        after = None
        has_more = True
        while has_more:
            items, has_more = catalog.list(tenant, now, limit=_PAGE, after=after)
            yield from items
            after = items[-1].id if items else None


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
