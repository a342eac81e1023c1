"""``kvlinker caches``: list, remove, pin, check and re-encrypt the context caches of a state
directory, without a model."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import SecretStr
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvlinker.base.types.chunks import with_places
from kvlinker.cli.console import BAD_USAGE, FAILURE, fail, failures, output_console
from kvlinker.cli.options import MetadataPairs, parse_pairs, settings_options
from kvlinker.settings import SHARED_TIER_SETTINGS, Settings
from kvlinker.settings.settings import CATALOG_FILE

if TYPE_CHECKING:
    from kvlinker.store import Catalog, ChunkStore, ContextCache

app = typer.Typer(help="List, remove and check what is stored.", no_args_is_help=True)

_SETTINGS = ("state_dir", "disk_space", *SHARED_TIER_SETTINGS)
_PAGE = 100


@app.command("ls")
@settings_options(*_SETTINGS)
def list_caches(settings: Settings, metadata: MetadataPairs = None) -> None:
    """List the context caches of all tenants, newest first."""
    pairs = parse_pairs(metadata)
    with _opened(settings) as (catalog, store):
        table = Table(box=None, pad_edge=False)
        table.add_column("id", no_wrap=True)
        for title in ("name", "tenant"):
            table.add_column(title)
        for title in ("tokens", "bytes"):
            table.add_column(title, justify="right")
        for title in ("tier", "created", "expires"):
            table.add_column(title)
        for cache in _all(catalog, pairs):
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
        output_console().print(table)


@app.command("rm")
@settings_options(*_SETTINGS)
def remove_caches(
    settings: Settings,
    ids: Annotated[
        list[str] | None, typer.Argument(help="Ids of context caches.", metavar="ID...")
    ] = None,
    metadata: MetadataPairs = None,
    everything: Annotated[
        bool,
        typer.Option(
            "--all",
            help=(
                "Remove all tenants' context caches and kept answers, and the beginnings of prompts"
                " that stopped servers have left."
            ),
        ),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before --all.")] = False,
) -> None:
    """Remove context caches of any tenant, with the KV that no other holds."""
    if bool(ids) + bool(metadata) + everything != 1:
        raise fail("name the ids of context caches, --metadata KEY=VALUE, or --all", BAD_USAGE)
    pairs = parse_pairs(metadata)
    with _opened(settings) as (catalog, store):
        known = {cache.id: cache for cache in _all(catalog, pairs)}
        wanted = list(dict.fromkeys(ids)) if ids else list(known)
        missing = [cache_id for cache_id in wanted if cache_id not in known]
        if everything and not yes:
            _confirm(len(wanted), settings.state_dir)
        if everything:
            store.forget_prefixes()
        for cache_id in wanted:
            if cache_id in known:
                for key in catalog.delete(cache_id, known[cache_id].tenant, time.time()):
                    store.delete(key)
        typer.echo(f"{len(wanted) - len(missing)} removed")
        if everything and (answers := catalog.responses.delete_all()):
            typer.echo(f"kept answers: {answers} removed")
        if missing:
            raise fail(f"no such context caches: {', '.join(missing)}", FAILURE)


@app.command("pin")
@settings_options("state_dir", "disk_space", "host_memory")
def pin_caches(
    settings: Settings,
    ids: Annotated[list[str], typer.Argument(help="Ids of context caches.", metavar="ID...")],
    off: Annotated[bool, typer.Option("--off", help="Let them be evicted again.")] = False,
) -> None:
    """Keep the KV of context caches from being evicted; a running server follows within seconds."""
    from kvlinker.store import Limits

    with _opened(settings) as (catalog, _):
        limits = Limits(
            settings.quotas, pinned_bytes=max(settings.disk_space, settings.host_memory) // 2
        )
        tenants = {cache.id: cache.tenant for cache in _all(catalog) if cache.id in ids}
        for cache_id in dict.fromkeys(ids):
            if cache_id in tenants:
                catalog.update(
                    cache_id, tenants[cache_id], time.time(), pinned=not off, limits=limits
                )
        typer.echo(f"{len(tenants)} {'unpinned' if off else 'pinned'}")
        if missing := [cache_id for cache_id in dict.fromkeys(ids) if cache_id not in tenants]:
            raise fail(f"no such context caches: {', '.join(missing)}", FAILURE)


@app.command("usage")
@settings_options(*_SETTINGS)
def show_usage(settings: Settings) -> None:
    """Show each tenant's usage: context caches, chunks, tokens, bytes of KV as computed, and bytes
    by tier."""
    with _opened(settings) as (catalog, store):
        table = Table(box=None, pad_edge=False)
        table.add_column("tenant")
        tiers = [
            tier.name
            for tier in store.usage_of(frozenset())
            if tier.budget_bytes or not tier.reachable
        ]
        for title in ("caches", "chunks", "tokens", "bytes", "pinned", *tiers):
            table.add_column(title, justify="right")
        for tenant in catalog.tenants():
            kept = catalog.usage(tenant)
            usages = [
                tier
                for tier in store.usage_of(with_places(catalog.keys_of(tenant)))
                if tier.name in tiers
            ]
            used = [tier.used_bytes if tier.reachable else "unreachable" for tier in usages]
            pinned = catalog.pinned_bytes(tenant)
            table.add_row(
                tenant,
                *map(str, (kept.caches, kept.chunks, kept.tokens, kept.bytes, pinned, *used)),
            )
        output_console().print(table)


@app.command("check")
@settings_options(*_SETTINGS)
def check_caches(
    settings: Settings,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair", help="Repair the catalog, and remove KV that no context cache holds."
        ),
    ] = False,
) -> None:
    """Verify the catalog, and every stored file against its checksums and the catalog.

    Damaged copies are removed: their KV is computed again when it is used. KV that this catalog
    does not hold is left to other servers in tiers that these share, and to a creation that may be
    under way where it was used in the last hour. The exit code is 1 when anything was wrong,
    repaired or not, else 0. A check that is interrupted leaves the rest to the next one.
    """
    with _opened(settings) as (catalog, store):
        faults = catalog.check(repair=repair)
        for fault in faults:
            typer.echo(f"catalog: {fault}; {'repaired' if repair else '--repair repairs it'}")
        damaged, unreachable = 0, False
        for tier in store.check():
            silent = "" if tier.reachable else "; it does not answer, so not all was checked"
            typer.echo(f"{tier.name}: {tier.checked} checked, {len(tier.damaged)} damaged{silent}")
            unreachable |= not tier.reachable
            for copy in tier.damaged:
                typer.echo(f"  {copy.key}: {copy.reason}; removed")
            damaged += len(tier.damaged)
        left = store.leftover_keys()  # before the catalog is read: what is entered now is no orphan
        held = catalog.chunk_keys().keys()
        orphans = sorted(left - with_places(held))
        for key in orphans:
            if repair:
                store.delete(key)
            typer.echo(
                f"  {key}: no context cache holds it;"
                f" {'removed' if repair else '--repair removes it'}"
            )
        absent = len(held - store.keys())
        typer.echo(
            f"{len(held)} chunks in the catalog: {absent} without KV (computed again when used)"
        )
        typer.echo(f"{len(orphans)} orphans")
        if faults or damaged or orphans or unreachable:
            raise typer.Exit(FAILURE)


@app.command("import")
@settings_options(*_SETTINGS)
def import_caches(
    settings: Settings,
    place: Annotated[
        Path,
        typer.Argument(
            exists=True, help="A state directory, or its catalog's file.", metavar="PLACE"
        ),
    ],
) -> None:
    """Add the context caches of another state directory, also of one that another version wrote:
    with their ids, owners, names and metadata.

    KV is computed again when it is used. What cannot be read is left out, and counted.
    """
    from kvlinker.base.events import Events
    from kvlinker.service.state import open_state

    source = place / CATALOG_FILE if place.is_dir() else place
    if not source.is_file():
        raise fail(f"there is no {source}", FAILURE)
    with failures():
        catalog, store = open_state(settings, Events(), host_bytes=0)
        with closing(catalog), closing(store):
            imported = catalog.import_from(source)
    typer.echo(
        f"{imported.added} imported; {imported.present} were here or have expired;"
        f" {imported.unreadable} could not be read"
    )


@app.command("rekey")
@settings_options("state_dir")
def rekey_caches(
    settings: Settings,
    decrypt: Annotated[
        bool, typer.Option("--decrypt", help="Take encryption off, instead of a new key.")
    ] = False,
) -> None:
    """Encrypt catalog and chunk files with another key: KVLINKER_NEW_ENCRYPTION_KEY in place of
    KVLINKER_ENCRYPTION_KEY.

    Without the old key, data that is not encrypted yet is encrypted. No server may run on the state
    directory meanwhile. A run that is interrupted is finished by another with the same keys. Chunks
    in tiers that servers share are computed again.
    """
    from kvlinker.store.format.sealing import NEW_KEY_VARIABLE, load_cipher
    from kvlinker.store.rekeying import rekey

    key = os.environ.get(NEW_KEY_VARIABLE)
    if (key is not None) == decrypt:
        raise fail(
            f"give the new key in {NEW_KEY_VARIABLE}, or --decrypt to take encryption off",
            BAD_USAGE,
        )
    _refuse_if_empty(settings)
    columns = (TextColumn("chunk files"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with (
        failures(),
        Progress(
            *columns, console=console, transient=True, disable=not console.is_terminal
        ) as progress,
    ):
        old = load_cipher(settings.encryption_key)
        new = None if key is None else load_cipher(SecretStr(key), NEW_KEY_VARIABLE)
        task = progress.add_task("", total=None)
        done = rekey(
            settings.catalog_place,
            settings.state_dir / "chunks",
            old,
            new,
            lambda done, total: progress.update(task, completed=done, total=total),
        )
    typer.echo(f"catalog: {'decrypted' if new is None else 'encrypted with the new key'}")
    typer.echo(f"chunk files: {done.written} written anew, {done.finished_before} were so before")
    if done.removed:
        typer.echo(
            f"{done.removed} opened with neither key and were removed (computed again when used)"
        )


def _confirm(count: int, state_dir: Path) -> None:
    """Ask before everything is removed. Ends the command at another answer than yes, and where
    nobody can answer."""
    if not sys.stdin.isatty():
        raise fail(f"{count:,} context caches would be removed: give --yes, too", BAD_USAGE)
    what = f"{count:,} context caches, and kept answers"
    typer.confirm(f"Remove all {what} of {state_dir}?", abort=True)


@contextmanager
def _opened(settings: Settings) -> Iterator[tuple[Catalog, ChunkStore]]:
    """Open the catalog and the store of a state directory; the command ends where nothing is stored
    there."""
    from kvlinker.base.events import Events
    from kvlinker.service.state import open_state

    _refuse_if_empty(settings)
    with failures():
        catalog, store = open_state(settings, Events(), host_bytes=0)
        with closing(catalog), closing(store):
            yield catalog, store


def _refuse_if_empty(settings: Settings) -> None:
    """End the command where there is no catalog's file, rather than make one."""
    place = settings.catalog_place
    if isinstance(place, Path) and not place.is_file():
        raise fail(f"nothing is stored in {settings.state_dir}", FAILURE)


def _all(
    catalog: Catalog, metadata: Mapping[str, str] = MappingProxyType({})
) -> Iterator[ContextCache]:
    now = time.time()
    for tenant in catalog.tenants():
        after = None
        has_more = True
        while has_more:
            items, has_more = catalog.list(tenant, now, limit=_PAGE, after=after, metadata=metadata)
            yield from items
            after = items[-1].id if items else None


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
