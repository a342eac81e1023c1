"""What is stored can be listed, removed and checked without a model."""

from __future__ import annotations

import os
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner, Result

from kvlinker.base.types.responses import KeptResponse
from kvlinker.cli import app
from kvlinker.llm import LLM
from kvlinker.store import Catalog, ContextCache
from kvlinker.store.chunk_store import LONGEST_CREATION_SECONDS
from tests.doors.http.serving import tiny_model, tiny_settings
from tests.redis_server import free_port

runner = CliRunner()


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def stored(state: Path) -> tuple[ContextCache, ...]:
    """Two context caches of one tenant, one of another's that is called like markup; an expired one
    is not listed."""
    with LLM.from_model(tiny_model(), tiny_settings(state)) as llm:
        first = llm.generate_context_cache(
            ["The cat sat on the mat.", "A dog"], name="pets", ttl=1000
        )
        other = llm.generate_context_cache(["numbers 1 2 3"], tenant="other", name="[/b]:cat:[x]")
        (gone,) = llm.generate_context_cache(["gone"])
        llm.catalog.update(gone.id, gone.tenant, time.time(), expires_at=time.time() - 1)
    return (*first, *other)


def caches(state: Path, *arguments: str) -> Result:
    return runner.invoke(app, ["caches", *arguments, "--state-dir", str(state)])


def files(state: Path) -> list[Path]:
    return [file for file in (state / "chunks").rglob("*") if file.is_file()]


def let_creations_end(state: Path) -> None:
    """The KV is so old that no creation can still be about to enter it."""
    for file in files(state):
        os.utime(file, (time.time() - LONGEST_CREATION_SECONDS - 1,) * 2)


def test_ls(state: Path, stored: tuple[ContextCache, ...]) -> None:
    result = caches(state, "ls")
    assert result.exit_code == 0
    header, *rows = result.stdout.splitlines()
    assert header.split() == [
        "id",
        "name",
        "tenant",
        "tokens",
        "bytes",
        "tier",
        "created",
        "expires",
    ]
    fields = {row.split()[0]: row.split() for row in rows}
    assert set(fields) == {cache.id for cache in stored}
    for cache in stored:
        _, name, tenant, tokens, size, tier, *_ = fields[cache.id]
        assert (name, tenant) == (cache.name or "-", cache.tenant)
        assert (int(tokens), tier) == (cache.tokens, "disk")
        assert int(size) > 0
    assert fields[stored[0].id][-1] != "never" == fields[stored[2].id][-1]


def test_ls_shows_evicted(state: Path, stored: tuple[ContextCache, ...]) -> None:
    for file in files(state):
        file.unlink()
    fields = {row.split()[0]: row.split() for row in caches(state, "ls").stdout.splitlines()}
    assert fields[stored[0].id][4:6] == ["0", "-"]


def test_long_list_is_complete(state: Path) -> None:
    with LLM.from_model(tiny_model(), tiny_settings(state)) as llm:
        made = llm.generate_context_cache(["the same"] * 230)
    listed = [row.split()[0] for row in caches(state, "ls").stdout.splitlines()[1:]]
    assert listed == [cache.id for cache in reversed(made)]


def test_rm(state: Path, stored: tuple[ContextCache, ...]) -> None:
    before = len(files(state))
    result = caches(state, "rm", stored[0].id, stored[2].id)
    assert (result.exit_code, result.stdout) == (0, "2 removed\n")
    assert len(files(state)) == before - 2
    assert [row.split()[0] for row in caches(state, "ls").stdout.splitlines()[1:]] == [stored[1].id]


def test_rm_all(state: Path, stored: tuple[ContextCache, ...]) -> None:
    with closing(Catalog(state / "catalog.sqlite")) as catalog:
        catalog.responses.add(KeptResponse("resp_1", "{}", "[]", {}), "anna", now=0, ttl=9e9)
    left = state / "chunks" / "prefixes" / "left-model"
    left.mkdir(parents=True)
    caches(state, "ls")
    assert left.exists()
    removed = f"{len(stored)} removed\nkept answers: 1 removed\n"
    assert caches(state, "rm", "--all", "--yes").stdout == removed
    assert not left.exists()
    assert len(caches(state, "ls").stdout.splitlines()) == 1


def test_rm_unknown(state: Path, stored: tuple[ContextCache, ...]) -> None:
    result = caches(state, "rm", stored[0].id, "cc_unknown")
    assert (result.exit_code, result.stdout) == (1, "1 removed\n")
    assert "cc_unknown" in result.stderr


def test_all_are_removed_only_where_somebody_says_yes(
    stored: tuple[ContextCache, ...], state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = caches(state, "rm", "--all")
    assert (result.exit_code, "would be removed: give --yes, too" in result.stderr) == (2, True)
    terminal = SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("kvlinker.cli.caches.sys", terminal)
    options = ["caches", "rm", "--all", "--state-dir", str(state)]
    refused = CliRunner().invoke(app, options, input="n\n")
    assert refused.exit_code == 1
    assert len(caches(state, "ls").stdout.splitlines()) == 1 + len(stored)


@pytest.mark.parametrize("arguments", [["rm"], ["rm", "--all", "cc_1"]])
def test_rm_wants_ids_or_all(
    state: Path, stored: tuple[ContextCache, ...], arguments: list[str]
) -> None:
    assert caches(state, *arguments).exit_code == 2
    assert len(caches(state, "ls").stdout.splitlines()) == 1 + len(stored)


@pytest.mark.parametrize("command", ["ls", "rm", "check"])
def test_nothing_there(tmp_path: Path, command: str) -> None:
    result = caches(tmp_path / "nowhere", command, *(["--all"] if command == "rm" else []))
    assert result.exit_code == 1
    assert "nothing is stored" in result.stderr
    assert not (tmp_path / "nowhere").exists()


def test_check_of_a_sound_store(state: Path, stored: tuple[ContextCache, ...]) -> None:
    result = caches(state, "check")
    assert result.exit_code == 0, result.output
    assert "disk: 4 checked, 0 damaged" in result.stdout
    assert "0 without KV" in result.stdout
    assert "0 orphans" in result.stdout


def test_check_drops_damaged_files(state: Path, stored: tuple[ContextCache, ...]) -> None:
    (damaged,) = [file for file in files(state) if stored[0].chunk_key in file.name]
    content = bytearray(damaged.read_bytes())
    content[-3] ^= 1
    damaged.write_bytes(content)
    result = caches(state, "check")
    assert result.exit_code == 1
    assert "1 damaged" in result.stdout
    assert stored[0].chunk_key in result.stdout
    assert "1 without KV" in result.stdout
    assert not damaged.exists()
    assert caches(state, "check").exit_code == 0


def test_check_tells_of_a_tier_that_does_not_answer(
    state: Path, stored: tuple[ContextCache, ...]
) -> None:
    result = caches(state, "check", "--redis-url", f"redis://127.0.0.1:{free_port()}")
    assert result.exit_code == 1
    assert "redis: 0 checked, 0 damaged; it does not answer" in result.stdout


def test_check_repairs_orphans(state: Path, stored: tuple[ContextCache, ...]) -> None:
    with LLM.from_model(tiny_model(), tiny_settings(state)) as llm:
        llm.catalog.delete(stored[1].id, stored[1].tenant, time.time())
    let_creations_end(state)
    for arguments, code in (([], 1), ([], 1), (["--repair"], 1), ([], 0)):
        result = caches(state, "check", *arguments)
        assert result.exit_code == code
        assert (stored[1].chunk_key in result.stdout) == bool(code)
    assert not [file for file in files(state) if stored[1].chunk_key in file.name]


def test_check_leaves_kv_to_running_creations(state: Path) -> None:
    with LLM.from_model(tiny_model(), tiny_settings(state)) as llm:
        text = "The cat sat on the mat."
        (cache,) = llm.generate_context_cache([text])
        llm.store.flush()
        llm.catalog.delete(cache.id, cache.tenant, time.time())  # as before it was entered
        result = caches(state, "check", "--repair")
        assert result.exit_code == 0, result.output
        assert "0 orphans" in result.stdout
        assert [file.stem for file in files(state)] == [cache.chunk_key]


def test_check_repairs_the_catalog(state: Path, stored: tuple[ContextCache, ...]) -> None:
    with closing(sqlite3.connect(state / "catalog.sqlite")) as raw, raw:
        raw.execute("UPDATE chunks SET tokens = x'00000000' WHERE key = ?", (stored[0].chunk_key,))
        raw.execute("UPDATE tenants SET caches = 77")
    assert "caches check --repair" in caches(state, "ls").stderr
    let_creations_end(state)
    for arguments, code in (([], 1), (["--repair"], 1), ([], 0)):
        result = caches(state, "check", *arguments)
        assert result.exit_code == code, result.output
        assert (f"token ids of chunk {stored[0].chunk_key}" in result.stdout) == bool(code)
        assert ("account of tenant" in result.stdout) == bool(code)
    assert {row.split()[0] for row in caches(state, "ls").stdout.splitlines()[1:]} == {
        cache.id for cache in stored[1:]
    }
    assert not [file for file in files(state) if stored[0].chunk_key in file.name]


def test_damaged_catalog_is_one_line(state: Path, stored: tuple[ContextCache, ...]) -> None:
    catalog = state / "catalog.sqlite"
    for file in state.glob("catalog.sqlite*"):
        file.unlink()
    catalog.write_bytes(b"this is no database" * 1000)
    result = caches(state, "ls")
    assert result.exit_code == 1
    assert "Traceback" not in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_ls_and_rm_by_metadata(state: Path) -> None:
    with LLM.from_model(tiny_model(), tiny_settings(state)) as llm:
        (a,) = llm.generate_context_cache(["a"], metadata={"project": "x=y", "page": "1"})
        (b,) = llm.generate_context_cache(
            ["b"], metadata={"project": "x=y", "page": "2"}, tenant="other"
        )
        (c,) = llm.generate_context_cache(["c"], metadata={"project": "z"})

    def listed(*options: str) -> set[str]:
        return {row.split()[0] for row in caches(state, "ls", *options).stdout.splitlines()[1:]}

    assert listed("--metadata", "project=x=y") == {a.id, b.id}
    assert listed("--metadata", "project=x=y", "--metadata", "page=2") == {b.id}
    assert caches(state, "rm", "--metadata", "project=x=y").stdout == "2 removed\n"
    assert listed() == {c.id}
    assert len(files(state)) == 1


@pytest.mark.parametrize(
    "arguments", [["ls", "--metadata", "project"], ["rm", "--metadata", "a=b", "cc_1"]]
)
def test_bad_metadata_options(
    state: Path, stored: tuple[ContextCache, ...], arguments: list[str]
) -> None:
    assert caches(state, *arguments).exit_code == 2


def test_pin(state: Path, stored: tuple[ContextCache, ...]) -> None:
    def pinned() -> frozenset[str]:
        with closing(Catalog(state / "catalog.sqlite")) as catalog:
            return catalog.pinned()

    assert caches(state, "pin", stored[0].id, stored[2].id).stdout == "2 pinned\n"
    assert pinned() == {stored[0].chunk_key, stored[2].chunk_key}
    result = caches(state, "pin", stored[0].id, "cc_unknown", "--off")
    assert (result.exit_code, result.stdout) == (1, "1 unpinned\n")
    assert "cc_unknown" in result.stderr
    assert pinned() == {stored[2].chunk_key}
    result = caches(state, "pin", stored[1].id, "--disk-space", "1kB", "--host-memory", "1kB")
    assert result.exit_code == 1
    assert "At most 500 bytes" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_usage(state: Path, stored: tuple[ContextCache, ...]) -> None:
    header, *rows = caches(state, "usage").stdout.splitlines()
    assert header.split() == ["tenant", "caches", "chunks", "tokens", "bytes", "pinned", "disk"]
    fields = {row.split()[0]: list(map(int, row.split()[1:])) for row in rows}
    assert fields.keys() == {"default", "other"}
    other = stored[2]
    assert fields["other"][:5] == [1, 1, other.tokens, other.kv_bytes, 0]
    assert fields["other"][5] > other.kv_bytes
