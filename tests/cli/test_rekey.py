"""The key of a state directory changes, is taken off and put on: nothing of the old one remains,
nothing is lost."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

from kvlinker.cli import app
from kvlinker.llm import LLM
from kvlinker.store import ContextCache, StoreError
from tests.doors.http.serving import tiny_model, tiny_settings

pytest.importorskip("cryptography")

FIRST, SECOND = "11" * 32, "22" * 32
TEXT = "The formula is secret, and so is whoever wrote it down."
GREEDY: dict[str, Any] = {"max_tokens": 4, "temperature": 0}


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture(autouse=True)
def _no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVLINKER_ENCRYPTION_KEY", "KVLINKER_NEW_ENCRYPTION_KEY"):
        monkeypatch.delenv(name, raising=False)


def started(state: Path, key: str | None, **options: Any) -> LLM:
    return LLM.from_model(tiny_model(), tiny_settings(state, encryption_key=key, **options))


def rekey(state: Path, old: str | None, new: str | None, *options: str) -> Result:
    keys = {"KVLINKER_ENCRYPTION_KEY": old, "KVLINKER_NEW_ENCRYPTION_KEY": new}
    return CliRunner().invoke(
        app, ["caches", "rekey", "--state-dir", str(state), *options], env=keys
    )


def content(state: Path) -> bytes:
    return b"".join(path.read_bytes() for path in state.rglob("*") if path.is_file())


def stored(llm: LLM) -> tuple[ContextCache, tuple[bytes, ...], Any]:
    """A context cache, what in it is secret, and an answer that uses it."""
    (cache,) = llm.generate_context_cache([TEXT])
    llm.store.flush()
    kv = llm.store.get(cache.chunk_key)
    assert kv is not None
    ids = np.asarray(cache.chunk.tokens, dtype="<u4").tobytes()
    answer = llm.completion((cache, "So?"), policy="naive", **GREEDY).token_ids
    return cache, (ids, kv.layers[0].value.view(torch.uint8).numpy().tobytes()), answer


@pytest.mark.parametrize(
    ("old", "new"),
    [(FIRST, SECOND), (None, FIRST), (FIRST, None)],
    ids=["another", "first", "none"],
)
def test_the_key_changes(state: Path, old: str | None, new: str | None) -> None:
    with started(state, old) as llm:
        cache, secrets, answer = stored(llm)
    sealed = content(state)
    done = rekey(state, old, new, *(["--decrypt"] if new is None else []))
    assert done.exit_code == 0, done.output
    assert "chunk files: 1 written anew, 0 were so before" in done.stdout
    assert all((secret in content(state)) == (new is None) for secret in secrets)
    for start in range(0, len(sealed) - 64, 997):
        block = sealed[start : start + 64]
        if old is not None and len(set(block)) > 40:  # random bytes
            assert block not in content(state), "what the old key opens remains"
    with started(state, new) as llm:
        assert llm.store.tier_of(cache.chunk_key) == "disk"
        assert all(tier.damaged == () for tier in llm.store.check())
        assert llm.completion((cache, "So?"), policy="naive", **GREEDY).token_ids == answer
    again = rekey(state, old, new, *(["--decrypt"] if new is None else []))
    assert again.exit_code == 0, again.output
    assert "0 written anew, 1 were so before" in again.stdout


def test_a_key_that_is_not_the_catalogs(state: Path) -> None:
    with started(state, FIRST) as llm:
        stored(llm)
    before = content(state)
    for old, message in ((SECOND, "is not the key"), (None, "is encrypted. Give its key")):
        done = rekey(state, old, "33" * 32)
        assert (done.exit_code, len(done.stderr.splitlines())) == (1, 1), done.output
        assert message in done.stderr
    assert content(state) == before


@pytest.mark.parametrize(
    ("new", "options", "message"),
    [
        (None, [], "KVLINKER_NEW_ENCRYPTION_KEY, or --decrypt"),
        (SECOND, ["--decrypt"], "KVLINKER_NEW_ENCRYPTION_KEY, or --decrypt"),
    ],
)
def test_what_to_do_has_to_be_said(
    state: Path, new: str | None, options: list[str], message: str
) -> None:
    with started(state, FIRST) as llm:
        stored(llm)
    before = content(state)
    done = rekey(state, FIRST, new, *options)
    assert (done.exit_code, len(done.stderr.splitlines())) == (2, 1)
    assert message in done.stderr
    assert content(state) == before


def test_a_new_key_that_is_none_and_a_folder_without_anything(state: Path) -> None:
    done = rekey(state, None, FIRST)
    assert (done.exit_code, "nothing is stored" in done.stderr) == (1, True)
    with started(state, None) as llm:
        stored(llm)
    done = rekey(state, None, "short")
    assert (done.exit_code, "KVLINKER_NEW_ENCRYPTION_KEY is no key" in done.stderr) == (1, True)


def test_not_under_a_running_server(state: Path) -> None:
    with started(state, FIRST) as llm:
        cache, _, answer = stored(llm)
        done = rekey(state, FIRST, SECOND)
        assert (done.exit_code, len(done.stderr.splitlines())) == (1, 1), done.output
        assert "in use by a server" in done.stderr
        assert llm.completion((cache, "So?"), policy="naive", **GREEDY).token_ids == answer
    assert rekey(state, FIRST, SECOND).exit_code == 0
    with pytest.raises(StoreError, match="is not the key"):
        started(state, FIRST)


def test_the_order_of_use_and_foreign_files_stay(state: Path) -> None:
    with started(state, FIRST) as llm:
        caches = [llm.generate_context_cache([f"{number}: {TEXT}"])[0] for number in range(3)]
        llm.store.flush()
        order = llm.store._tiers[1].keys()
    damaged = next(state.glob(f"chunks/??/{order[1]}.*"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    half = damaged.with_name(f"{damaged.stem}abc.tmp")
    half.write_bytes(b"half a chunk")
    aside = state / "chunks" / "notes.txt"
    aside.write_text("mine")
    done = rekey(state, FIRST, SECOND)
    assert "2 written anew, 0 were so before" in done.stdout
    assert "1 opened with neither key" in done.stdout
    assert not half.exists()
    assert aside.read_text() == "mine"
    with started(state, SECOND) as llm:
        assert llm.store._tiers[1].keys() == (order[0], order[2])
        assert len(llm.list_caches().items) == len(caches)


def test_a_full_disk_is_told_and_the_rest_done_later(state: Path) -> None:
    with started(state, FIRST) as llm:
        cache, _, answer = stored(llm)
    with mock.patch("os.fsync", side_effect=OSError(errno.ENOSPC, "No space left on device")):
        done = rekey(state, FIRST, SECOND)
    assert (done.exit_code, len(done.stderr.splitlines())) == (1, 1), done.output
    assert "Run this again with the same keys" in done.stderr
    assert not list(state.glob("chunks/??/*.tmp"))
    assert "1 written anew, 0 were so before" in rekey(state, FIRST, SECOND).stdout
    with started(state, SECOND) as llm:
        assert llm.store.tier_of(cache.chunk_key) == "disk"
        assert llm.completion((cache, "So?"), policy="naive", **GREEDY).token_ids == answer


def test_chunks_in_shared_tiers_become_misses(state: Path, tmp_path: Path) -> None:
    options = {"object_url": f"file://{tmp_path}/objects", "disk_space": 0}
    with started(state, FIRST, **options) as llm:
        cache, _, answer = stored(llm)
    assert rekey(state, FIRST, SECOND).exit_code == 0
    with started(state, SECOND, **options) as llm:
        assert llm.completion((cache, "So?"), policy="naive", **GREEDY).token_ids == answer
        llm.store.flush()
    with started(state, SECOND, **options) as llm:
        assert llm.store.tier_of(cache.chunk_key) == "object"
        assert all(tier.damaged == () for tier in llm.store.check())
