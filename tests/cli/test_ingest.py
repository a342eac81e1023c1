"""Files become context caches, here or in a server."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kvlinker.cli import app
from kvlinker.llm import LLM
from tests.server.serving import TEMPLATE, Served, tiny_model, tiny_settings

runner = CliRunner()


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A folder with two texts, and with what is no text."""
    folder = tmp_path / "library"
    (folder / "deep").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / "cats.md").write_text("# Cats\n\nThe cat sat on the mat.\n\n# Dogs\n\nA dog.\n")
    (folder / "deep" / "numbers.txt").write_text("numbers 1 2 3 and more words")
    (folder / "image.png").write_bytes(b"\x89PNG\0\0")
    (folder / "latin.txt").write_bytes("Käse".encode("latin-1"))
    (folder / "blank.txt").write_text("\n \n")
    (folder / ".git" / "config").write_text("hidden")
    return folder


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state directory of ingests in this process, on the tiny model."""
    monkeypatch.setattr("kvlinker.startup.load_model", lambda _: tiny_model())
    monkeypatch.setenv("KVLINKER_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("KVLINKER_CHAT_TEMPLATE", TEMPLATE)
    return tmp_path / "state"


def ingest(*arguments: object) -> Result:
    return runner.invoke(app, ["ingest", *map(str, arguments)])


def lines(result: Result) -> list[tuple[str, str]]:
    """Id and file of each printed context cache."""
    assert result.exit_code == 0, result.stderr
    return [(line.split()[0], line.split(maxsplit=2)[2]) for line in result.stdout.splitlines()]


def test_folder(library: Path, state: Path) -> None:
    result = ingest(library, "--method", "markdown")
    printed = lines(result)
    assert [Path(file).name for _, file in printed] == ["cats.md", "cats.md", "numbers.txt"]
    for name in ("image.png", "latin.txt", "blank.txt"):
        assert f"{name} is left out" in result.stderr
    assert "config" not in result.stdout + result.stderr
    with LLM.from_model(tiny_model(), tiny_settings(state)) as llm:
        for cache_id, file in printed:
            cache = llm.caches.get(cache_id, tenant="default")
            assert cache.metadata["source"] == file == cache.name
            assert llm.caches.tier(cache) == "disk"


def test_text_is_complete(library: Path, state: Path) -> None:
    printed = lines(ingest(library / "cats.md", "--method", "fixed", "--max-tokens", "5"))
    with LLM.from_model(tiny_model(), tiny_settings(state)) as llm:
        caches = [llm.caches.get(cache_id, tenant="default") for cache_id, _ in printed]
        assert len(caches) > 2
        assert all(cache.tokens <= 5 for cache in caches)
        text = llm.tokenizer.decode([token for cache in caches for token in cache.chunk.tokens])
    assert text == (library / "cats.md").read_text()


def test_ingested_chunks_are_used_by_a_server_that_starts_later(library: Path, state: Path) -> None:
    """Same settings, same prefix: what was ingested is linked, not computed again."""
    ((cache_id, _),) = lines(ingest(library / "deep"))
    with LLM.from_model(tiny_model(), tiny_settings(state)) as llm:
        cache = llm.caches.get(cache_id, tenant="default")
        answer = llm.chat_completion([{"role": "user", "content": [cache, "So?"]}], max_tokens=1)
        assert (answer.usage.cached_tokens, answer.usage.recomputed_tokens) == (cache.tokens, 0)


def test_json(library: Path, state: Path) -> None:
    result = ingest(library, "--glob", "*.txt", "--json")
    (entry,) = json.loads(result.stdout)
    assert entry["file"] == str(library / "deep" / "numbers.txt")
    assert [set(cache) for cache in entry["caches"]] == [{"id", "tokens"}]


def test_ttl(library: Path, state: Path) -> None:
    ((cache_id, _),) = lines(ingest(library / "deep", "--ttl", "1000"))
    with LLM.from_model(tiny_model(), tiny_settings(state)) as llm:
        expires_at = llm.caches.get(cache_id, tenant="default").expires_at
    assert expires_at is not None
    assert abs(expires_at - time.time() - 1000) < 30


def test_same_file_twice_is_ingested_once(library: Path, state: Path) -> None:
    assert len(lines(ingest(library / "deep", library / "deep" / "numbers.txt"))) == 1


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (["missing"], 2, "missing"),
        ([".", "--max-tokens", "0"], 2, "--max-tokens"),
        (["image.png"], 1, "no text"),
        ([".", "--glob", "*.rst"], 1, "no text"),
        ([".", "--method", "paragaph"], 2, "--method is 'paragaph': it must be one of fixed, markdown, paragraph"),
        ([".", "--ttl", "-5"], 2, "--ttl"),
        ([".", "--ttl", "1e15", "--url", "SERVER"], 1, "ttl"),
        ([".", "--max-tokens", "99999999"], 1, "split.max_tokens"),
        ([".", "--max-tokens", "99999999", "--url", "SERVER"], 1, "split.max_tokens"),
        ([".", "--url", "http://127.0.0.1:9"], 1, "cannot be reached"),
    ],
)
def test_failures(
    library: Path,
    state: Path,
    served: Served,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    code: int,
    complaint: str,
) -> None:
    monkeypatch.chdir(library)
    result = ingest(*[served.url if argument == "SERVER" else argument for argument in arguments])
    assert result.exit_code == code
    assert complaint in result.stderr
    assert "Traceback" not in result.stderr


def test_through_a_server(library: Path, served: Served) -> None:
    printed = lines(ingest(library, "--method", "markdown", "--url", served.url, "--ttl", "500"))
    assert len(printed) == 3
    for cache_id, file in printed:
        entry: dict[str, Any] = served.get(f"/v1/context_caches/{cache_id}").json()
        assert entry["metadata"] == {"source": file}
        assert entry["expires_at"] is not None


def test_through_a_server_with_keys(library: Path, keyed: Served) -> None:
    file = library / "cats.md"
    refused = ingest(file, "--url", keyed.url, "--api-key", "wrong")
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "API key" in refused.stderr
    ((cache_id, _),) = lines(ingest(file, "--url", keyed.url, "--api-key", "key-alpha"))
    url = f"/v1/context_caches/{cache_id}"
    assert keyed.get(url, headers={"Authorization": "Bearer key-alpha"}).status_code == 200


def test_tenant_of_a_key(library: Path, state: Path) -> None:
    from kvlinker.types.tenants import tenant_of_key

    ((cache_id, _),) = lines(ingest(library / "deep", "--api-key", "key-alpha"))
    with LLM.from_model(tiny_model(), tiny_settings(state)) as llm:
        assert llm.caches.get(cache_id, tenant=tenant_of_key("key-alpha")).id == cache_id
