"""What the crash tests' child processes do to a state directory until they are killed, and what
they tell of it."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from typer.testing import CliRunner, Result

from kvlinker.base.errors import ContextCacheNotFoundError, PinLimitError
from kvlinker.base.events import Events
from kvlinker.base.types.chunks import Chunk, chunk_key
from kvlinker.base.types.tenants import NO_QUOTAS, Quotas
from kvlinker.cli import caches as caches_commands
from kvlinker.llm import LLM
from kvlinker.service.context_caches import ChunkTexts, ContextCaches
from kvlinker.settings import load_settings
from kvlinker.store import Catalog, ChunkKV, ChunkStore, ContextCache, open_store
from kvlinker.store.chunk_store import LONGEST_CREATION_SECONDS
from kvlinker.store.format.encryption import Cipher
from kvlinker.store.rekeying import rekey
from kvlinker.store.tiers import Tier, TierSetup, configured_tiers
from tests.doors.http.serving import tiny_model, tiny_settings
from tests.store.store_chunks import chunk_kv

CLOCKED = tuple(
    f"kvlinker.service.context_caches.{name}" for name in ("caches", "creation", "maintenance")
)
"""The modules that read the time of context caches, for tests that set it."""

FINGERPRINT = "sha256:weights"
CONTENTS = 24
HOST_BYTES = 20_000
DISK_BYTES = 60_000  # some seven chunks
SHARED_BYTES = 80_000
TENANTS = ("anna", "bert")

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.store.crash_work"])


class Shared(NamedTuple):
    """The tiers that a state directory shares with others."""

    redis_url: str | None = None
    object_url: str | None = None

    @property
    def settings(self) -> dict[str, str]:
        urls = {name: url for name, url in self._asdict().items() if url is not None}
        return urls if self.object_url is None else urls | {"object_space": str(SHARED_BYTES)}

    def tiers(self) -> list[Tier]:
        """Open them, and no other."""
        setup = TierSetup(load_settings(disk_space=0, **self.settings), Events(), host_bytes=0)
        return [tier.open() for tier in configured_tiers(setup) if tier.name != "host"]

    @property
    def options(self) -> list[str]:
        """Of commands."""
        return [
            part
            for name, value in self.settings.items()
            for part in (f"--{name.replace('_', '-')}", value)
        ]


ALONE = Shared()


def start(target: Callable[[Path, int], None], folder: Path, seed: int) -> ForkServerProcess:
    """A process that works until it is killed."""
    process = PROCESSES.Process(target=target, args=(folder, seed), daemon=True)
    with mock.patch.dict(
        os.environ, {"PYTHONPATH": os.pathsep.join(sys.path)}
    ):  # what is preloaded is looked up there
        process.start()
    return process


def chunk_of(number: int) -> Chunk:
    return Chunk(tokens=(number,) * (60 + number), prefix=(1,))


def kv_of(chunk: Chunk) -> ChunkKV:
    """As if a model had computed it: the same for the same tokens."""
    return chunk_kv(chunk.tokens[0], tokens=len(chunk))


class NumberBuilder:
    """The prompt builder, as far as context caches need it: a text is a number."""

    def encode_chunk(self, text: str, context: object) -> Chunk:
        return chunk_of(int(text))


class NumberEncoder:
    """The prompt builder's encoder, as far as the search of chunks needs it."""

    def decode_data(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))


class NumberEngine:
    """The engine, as far as context caches need it."""

    healthy = True
    fingerprint = FINGERPRINT
    kv_bytes_per_token = 80
    max_model_len = 1000

    def __init__(self, store: ChunkStore) -> None:
        self._store = store

    def cache_chunk(self, chunk: Chunk, *, tenant: str) -> Future[int]:
        self.use(chunk, tenant)
        done: Future[int] = Future()
        done.set_result(len(chunk))
        return done

    def expect_together(self, chunks: Sequence[Chunk], *, tenant: str) -> None:
        """Compute nothing more of them."""

    def kv_bytes(self, tokens: int) -> int:
        return tokens * self.kv_bytes_per_token

    def use(self, chunk: Chunk, tenant: str) -> ChunkKV:
        """Its KV from the store, or computed again."""
        key = chunk_key(chunk, fingerprint=FINGERPRINT, tenant=tenant)
        kv = self._store.get(key)
        if kv is None:
            kv = kv_of(chunk)
            self._store.put(key, kv)
        return kv


class State(NamedTuple):
    """An opened state directory."""

    catalog: Catalog
    store: ChunkStore
    engine: NumberEngine
    caches: ContextCaches

    def close(self) -> None:
        self.caches.close()
        self.store.close()
        self.catalog.close()


def open_state(
    folder: Path, shared: Shared = ALONE, quotas: Quotas = NO_QUOTAS, cipher: Cipher | None = None
) -> State:
    """As ``LLM`` opens it."""
    settings = load_settings(
        state_dir=folder, host_memory=HOST_BYTES, disk_space=DISK_BYTES, **shared.settings
    )
    catalog = Catalog(folder / "catalog.sqlite", cipher)
    store = open_store(settings, Events(), pinned=catalog.pinned(), cipher=cipher)
    engine = NumberEngine(store)
    caches = ContextCaches(
        model="numbers",
        builder=NumberBuilder(),  # type: ignore[arg-type]
        engine=engine,  # type: ignore[arg-type]
        catalog=catalog,
        store=store,
        texts=ChunkTexts(
            catalog,
            NumberEncoder(),  # type: ignore[arg-type]
            fingerprint=engine.fingerprint,
            searchable=cipher is None,
        ),
        events=Events(),
        quotas=quotas,
    )
    return State(catalog, store, engine, caches)


def check(folder: Path, *options: str, shared: Shared = ALONE) -> Result:
    """Run ``kvlinker caches check``, when all creations so far must be over."""
    for path in folder.glob("chunks/??/*.safetensors"):
        with suppress(OSError):
            used_at = path.lstat().st_mtime - LONGEST_CREATION_SECONDS - 1
            os.utime(path, (used_at, used_at), follow_symlinks=False)
    arguments = ["check", "--state-dir", str(folder), "--disk-space", str(DISK_BYTES), *options]
    return CliRunner().invoke(caches_commands.app, [*arguments, *shared.options])


def work(folder: Path, seed: int, shared: Shared = ALONE, *, others: bool = False) -> None:
    """Create, use, change, delete and repair until the process is killed. With ``others`` that tell
    in the same journal, nothing is deleted by metadata, for that may be what another one has just
    told of."""
    journal = os.open(folder / "journal", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    randomness = random.Random(seed)
    state = open_state(folder, shared)
    tell = partial(_tell, journal)
    steps: Sequence[Callable[[State, random.Random, Callable[..., None]], None]]
    steps = (
        [_create] * 6
        + [_use] * 5
        + [_update] * 3
        + [_delete] * 3
        + [_sweep if others else _delete_matching, _sweep]
    )
    while True:
        if randomness.random() < 0.03:
            check(
                folder, "--repair", shared=shared
            )  # beside the open store, as beside a running server
            tell("step", "check")
        step = randomness.choice(steps)
        with suppress(
            PinLimitError, ContextCacheNotFoundError
        ):  # the latter: another process deleted it
            step(state, randomness, tell)
        tell("step", step.__name__)


def repair(folder: Path, seed: int) -> None:
    """Mend again and again."""
    while True:
        check(folder, "--repair")


def change_keys(folder: Path, seed: int, first: bytes | None, second: bytes | None) -> None:
    """From the first key to the second and back, again and again."""
    old, new = (None if key is None else Cipher(key) for key in (first, second))
    while True:
        rekey(folder / "catalog.sqlite", folder / "chunks", old, new)
        old, new = new, old


def answer(folder: Path, seed: int) -> None:
    """What a server does, with a model: create, answer with what is there, delete."""
    randomness = random.Random(seed)
    with LLM.from_model(tiny_model(), tiny_settings(folder, disk_space=DISK_BYTES)) as llm:
        while True:
            llm.generate_context_cache(
                [f"Text {randomness.randrange(CONTENTS)}."] * randomness.randint(1, 2)
            )
            cache = randomness.choice(llm.list_caches().items)
            llm.chat_completion([{"role": "user", "content": [cache]}], max_tokens=2)
            if randomness.random() < 0.3:
                llm.expire_cache(cache)


def _tell(journal: int, *line: Any) -> None:
    os.write(journal, json.dumps(line).encode() + b"\n")


def _create(state: State, randomness: random.Random, tell: Callable[..., None]) -> None:
    numbers = [randomness.randrange(CONTENTS) for _ in range(randomness.randint(1, 3))]
    short = randomness.random() < 0.2
    created = state.caches.create(
        [str(number) for number in numbers],
        tenant=randomness.choice(TENANTS),
        expires_at=1.0 if short else None,  # has passed
        metadata={"batch": str(randomness.randrange(5))},
        pinned=randomness.random() < 0.1,
    ).result()
    if not short:
        tell("created", [cache.id for cache in created])


def _one(state: State, randomness: random.Random) -> ContextCache | None:
    tenant = randomness.choice(TENANTS)
    items = state.caches.list(tenant=tenant, limit=50).items
    return randomness.choice(items) if items else None


def _use(state: State, randomness: random.Random, tell: Callable[..., None]) -> None:
    if cache := _one(state, randomness):
        state.engine.use(
            state.caches.usable([cache.id], tenant=cache.tenant)[cache.id].chunk, cache.tenant
        )


def _update(state: State, randomness: random.Random, tell: Callable[..., None]) -> None:
    if cache := _one(state, randomness):
        pinned = not cache.pinned and len(state.catalog.pinned()) < 3
        state.caches.update(cache.id, tenant=cache.tenant, pinned=pinned, metadata={"batch": "5"})


def _delete(state: State, randomness: random.Random, tell: Callable[..., None]) -> None:
    if cache := _one(state, randomness):
        tell("deleting", [cache.id])
        state.caches.delete(cache.id, tenant=cache.tenant)
        tell("deleted", [cache.id])


def _delete_matching(state: State, randomness: random.Random, tell: Callable[..., None]) -> None:
    tenant, metadata = randomness.choice(TENANTS), {"batch": str(randomness.randrange(6))}
    ids = [
        cache.id
        for cache in state.caches.list(tenant=tenant, metadata=metadata, limit=10_000).items
    ]
    tell("deleting", ids)
    state.caches.delete_matching(metadata, tenant=tenant)
    tell("deleted", ids)


def _sweep(state: State, randomness: random.Random, tell: Callable[..., None]) -> None:
    state.caches.sweep()
