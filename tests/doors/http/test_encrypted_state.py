"""A server whose state directory is encrypted: nothing in it can be read, and nothing works
differently."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from kvlinker.cli import app
from kvlinker.llm import LLM
from kvlinker.store import StoreError
from tests.doors.http.serving import tiny_model, tiny_settings

pytest.importorskip("cryptography")

KEY = "00112233445566778899aabbccddeeff" * 2
TEXT = "The formula is secret, and so is whoever wrote it down."
GREEDY: dict[str, Any] = {"max_tokens": 4, "temperature": 0}


def started(state: Path, key: str | None = KEY) -> LLM:
    return LLM.from_model(tiny_model(), tiny_settings(state, encryption_key=key))


def content(state: Path) -> bytes:
    return b"".join(path.read_bytes() for path in state.rglob("*") if path.is_file())


def test_encrypted_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = tmp_path / "state"
    with started(state, key=None) as llm:
        (cache,) = llm.generate_context_cache([TEXT])
        llm.store.flush()
        kv = llm.store.get(cache.chunk_key)  # values are in memory as they are in files
        assert kv is not None
        secrets = (
            np.asarray(cache.chunk.tokens, dtype="<u4").tobytes(),
            kv.layers[0].value.view(torch.uint8).numpy().tobytes(),
        )
        answer = llm.completion((cache, "So?"), policy="naive", **GREEDY)
        assert all(secret in content(state) for secret in secrets)
    with started(state) as llm:
        assert (
            llm.completion((cache, "So?"), policy="naive", **GREEDY).token_ids == answer.token_ids
        )
        llm.store.flush()
        assert llm.store.usage()[1].chunks == 1
        assert not any(secret in content(state) for secret in secrets), (
            "the plain file was damage, and made again"
        )
    with started(state) as llm:
        assert llm.store.tier_of(cache.chunk_key) == "disk"
        assert (
            llm.completion((cache, "So?"), policy="naive", **GREEDY).token_ids == answer.token_ids
        )
    for key, message in ((None, "is encrypted. Give its key"), ("11" * 32, "is not the key")):
        with pytest.raises(StoreError, match=message):
            started(state, key)
    check = ["caches", "check", "--state-dir", str(state)]
    refused = CliRunner().invoke(app, check)
    assert (refused.exit_code, len(refused.stderr.splitlines())) == (1, 1)
    monkeypatch.setenv("KVLINKER_ENCRYPTION_KEY", KEY)
    checked = CliRunner().invoke(app, check)
    assert checked.exit_code == 0, checked.output
    assert "disk: 1 checked, 0 damaged" in checked.stdout
    assert KEY not in repr(tiny_settings(state))
