"""Files become context caches, here or in a server."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kvlinker.cli import app
from kvlinker.cli.documents.plan import named_from_root
from kvlinker.llm import LLM
from tests.doors.http.serving import TEMPLATE, Served, tiny_model, tiny_settings

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
    (folder / "blank.txt").write_text("\n \n")
    (folder / ".git" / "config").write_text("hidden")
    return folder


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state directory of ingests in this process, on the tiny model."""
    monkeypatch.setattr("kvlinker.service.startup.load_model", lambda *_: tiny_model())
    monkeypatch.setenv("KVLINKER_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("KVLINKER_CHAT_TEMPLATE", TEMPLATE)
    return tmp_path / "state"


def ingest(*arguments: object) -> Result:
    return runner.invoke(app, ["ingest", *map(str, arguments)])


def lines(result: Result) -> list[dict[str, Any]]:
    """What was printed of each context cache."""
    assert result.exit_code == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def ids(result: Result) -> list[str]:
    return [line["id"] for line in lines(result)]


def open_state(state: Path) -> LLM:
    return LLM.from_model(tiny_model(), tiny_settings(state))


def kept(state: Path) -> dict[str, str]:
    """The texts of all context caches by id."""
    with open_state(state) as llm:
        return {
            cache.id: llm.read_cache(cache).text
            for cache in llm.list_caches(limit=100, order="asc").items
        }


def test_folder(library: Path, state: Path) -> None:
    result = ingest(library, "--method", "markdown")
    printed = lines(result)
    cats = (library / "cats.md").read_text()
    assert [Path(line["file"]).name for line in printed] == ["cats.md", "cats.md", "numbers.txt"]
    assert [line["index"] for line in printed] == [0, 1, 0]
    assert [cats[line["start"] : line["end"]] for line in printed[:2]] == [cats[:-15], cats[-15:]]
    assert all(line["new"] for line in printed)
    for name, reason in (
        ("image.png", "it is not text"),
        ("blank.txt", "it is empty"),
    ):
        assert re.search(rf"{name} is left out: .*{reason}", result.stderr)
    assert "config" not in result.stdout + result.stderr
    assert "3 chunks cached; 0 chunks of 2 files were cached already" in result.stderr
    with open_state(state) as llm:
        for line in printed:
            cache = llm.caches.get(line["id"], tenant="default")
            assert cache.metadata["source"] == line["file"] == cache.name
            assert [cache.metadata[name] for name in ("index", "start", "end")] == [
                str(line[name]) for name in ("index", "start", "end")
            ]
            assert cache.tokens == line["tokens"]
            assert llm.caches.tier(cache) == "disk"


def test_files_that_are_left_out_for_one_reason_are_one_line(library: Path, state: Path) -> None:
    for number in range(5):
        (library / f"picture{number}.png").write_bytes(b"\x89PNG\0\0")
    result = ingest(library)
    (line,) = [each for each in result.stderr.splitlines() if "it is not text" in each]
    assert line.startswith(
        "kvlinker: warning: 6 files (image.png, picture0.png, picture1.png and 3 more) are left out"
    )


def test_text_is_complete(library: Path, state: Path) -> None:
    printed = lines(ingest(library / "cats.md", "--method", "fixed", "--max-tokens", "5"))
    assert len(printed) > 2
    assert all(line["tokens"] <= 5 for line in printed)
    texts = kept(state)
    assert "".join(texts[line["id"]] for line in printed) == (library / "cats.md").read_text()
    assert [line["start"] for line in printed[1:]] == [line["end"] for line in printed[:-1]]


def test_ingested_chunks_are_used_by_a_server_that_starts_later(library: Path, state: Path) -> None:
    """Same settings, same prefix: what was ingested is linked, not computed again."""
    (cache_id,) = ids(ingest(library / "deep"))
    with open_state(state) as llm:
        cache = llm.caches.get(cache_id, tenant="default")
        answer = llm.chat_completion([{"role": "user", "content": [cache, "So?"]}], max_tokens=1)
        assert (answer.usage.cached_tokens, answer.usage.recomputed_tokens) == (cache.tokens, 0)


def test_second_run_changes_nothing(
    library: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = ingest(library)
    monkeypatch.setattr(
        "kvlinker.cli.documents.plan.read_document",
        lambda *_: pytest.fail("unchanged files are not split"),
    )
    second = ingest(library, "--glob", "*[ds].*")  # without those that have no text
    assert lines(second) == [line | {"new": False} for line in lines(first)]
    assert "nothing new; 2 chunks of 2 files were cached already" in second.stderr
    assert len(kept(state)) == 2


def test_relative_and_absolute_paths_are_the_same_file(
    library: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(library)
    made = ids(ingest("cats.md"))
    assert made == ids(ingest(library / "cats.md"))
    monkeypatch.chdir(library / "deep")
    assert made == ids(ingest("../cats.md")) == ids(ingest("..", "--glob", "*.md"))
    assert len(kept(state)) == 1


def test_links_keep_their_names_and_lead_where_the_system_follows_them(tmp_path: Path) -> None:
    (tmp_path / "releases" / "5").mkdir(parents=True)
    (tmp_path / "current").symlink_to(tmp_path / "releases" / "5")
    (tmp_path / "releases" / "notes.md").write_text("notes")
    assert named_from_root(tmp_path / "current") == tmp_path / "current"
    above = tmp_path / "current" / ".." / "notes.md"
    assert named_from_root(above) == tmp_path / "releases" / "notes.md"
    around = tmp_path / "releases" / ".." / "current"
    assert named_from_root(around) == tmp_path / "current"


def test_run_that_was_killed_goes_on(
    library: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the midst of a file, with several chunks that were not reached."""
    text = "\n\n".join(f"Paragraph {number} of a longer text." for number in range(12))
    (library / "long.txt").write_text(text)
    monkeypatch.setattr("kvlinker.cli.documents.caching.BATCH_TOKENS", 20)
    arguments = (library / "long.txt", "--method", "paragraph")
    create = LLM.generate_context_cache
    calls = 0

    def interrupted(llm: LLM, *positional: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return create(llm, *positional, **options)

    with monkeypatch.context() as patch:
        patch.setattr(LLM, "generate_context_cache", interrupted)
        first = ingest(*arguments)
    assert first.exit_code == 130
    assert "goes on from here" in first.stderr
    before = [json.loads(line)["id"] for line in first.stdout.splitlines()]
    assert 0 < len(before) < 12
    second = lines(ingest(*arguments))
    assert [line["index"] for line in second] == list(range(12))
    assert [line["id"] for line in second if not line["new"]] == before
    texts = kept(state)
    assert len(texts) == 12
    assert "".join(texts[line["id"]] for line in second) == text


def test_what_was_deleted_in_between_is_cached_again(library: Path, state: Path) -> None:
    first = ids(ingest(library, "--method", "markdown"))
    with open_state(state) as llm:
        llm.expire_cache(first[0])
    second = lines(ingest(library, "--method", "markdown"))
    assert [
        line["new"] for line in sorted(second, key=lambda line: (line["file"], line["index"]))
    ] == [
        True,
        False,
        False,
    ]


def test_metadata_that_was_changed(library: Path, state: Path) -> None:
    """Such a context cache is its owner's: it is neither taken for the file's nor removed."""
    (cache_id,) = ids(ingest(library / "deep"))
    with open_state(state) as llm:
        llm.update_cache(cache_id, metadata={"origin": "kvlinker ingest", "index": "first"})
    (line,) = lines(ingest(library / "deep", "--sync"))
    assert line["new"]
    assert cache_id in kept(state)


def test_changed_file(library: Path, state: Path) -> None:
    """Its new version is cached; the old one goes with --sync."""
    first = ids(ingest(library, "--method", "markdown"))
    (library / "cats.md").write_text("# Cats\n\nThe cat ran.\n\n# Dogs\n\nA dog.\n")
    second = ingest(library, "--method", "markdown")
    assert [line["new"] for line in lines(second)] == [True, True, False]
    assert (
        "2 chunks of files that are gone or have changed are still cached; --sync removes them"
        in second.stderr
    )
    assert set(first) < set(kept(state))
    third = ingest(library, "--method", "markdown", "--sync")
    assert "nothing new, 2 removed" in third.stderr
    assert sorted(kept(state)) == sorted(ids(third)) == sorted(ids(second))


def test_other_chunks_of_the_same_file(library: Path, state: Path) -> None:
    first, second = (lines(ingest(library / "cats.md", "--max-tokens", size)) for size in (512, 8))
    assert len(first) < len(second)
    assert all(line["new"] for line in second)


def test_sync_removes_what_is_gone_and_nothing_else(
    library: Path, state: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "far.txt").write_text("far away")
    (library / "note.rst").write_text("a note")
    ingest(library, other)
    with open_state(state) as llm:
        llm.generate_context_cache(["not a file's"], metadata={"source": str(library / "gone.txt")})
    (library / "deep" / "numbers.txt").unlink()
    (other / "far.txt").unlink()
    result = ingest(library, "--sync", "--glob", "*.md")
    assert result.exit_code == 0, result.stderr
    texts = set(kept(state).values())
    assert "numbers 1 2 3 and more words" not in texts
    assert {
        "far away",
        "a note",
        "not a file's",
    } <= texts, "not below the path; another glob; not ingested"
    assert any(text.startswith("# Cats") for text in texts)
    shutil.rmtree(library / "deep")
    (library / "cats.md").write_text(" ")
    emptied = ingest(library, "--sync")
    assert "1 removed" in emptied.stderr
    assert set(kept(state).values()) == {"far away", "a note", "not a file's"}


def test_sync_of_an_emptied_folder(library: Path, state: Path) -> None:
    ingest(library)
    shutil.rmtree(library)
    library.mkdir()
    result = ingest(library, "--sync")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "nothing new, 2 removed" in result.stderr
    assert kept(state) == {}


def test_same_texts_in_two_files(library: Path, state: Path) -> None:
    """Each file has its own context caches, which share their KV."""
    (library / "copy.md").write_bytes((library / "cats.md").read_bytes())
    printed = lines(ingest(library, "--glob", "c*.md"))
    assert [Path(line["file"]).name for line in printed] == ["cats.md", "copy.md"]
    with open_state(state) as llm:
        usage = llm.caches_usage().kept
        assert (usage.caches, usage.chunks) == (2, 1)
        assert len(llm.search("cat")) == 1
    assert not any(line["new"] for line in lines(ingest(library, "--glob", "c*.md")))


def test_chunks_of_another_model_are_cached_again(
    library: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = ids(ingest(library))
    monkeypatch.setattr("kvlinker.service.startup.load_model", lambda *_: tiny_model(head_dim=16))
    second = ingest(library, "--sync")
    assert [line["new"] for line in lines(second)] == [True, True]
    assert "2 removed" in second.stderr
    assert not set(first) & set(ids(second))


def test_unreadable_file(library: Path, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Path.read_bytes

    def refused(path: Path) -> bytes:
        if path.name == "cats.md":
            raise PermissionError(13, "Permission denied")
        return read(path)

    ingest(library)
    monkeypatch.setattr(Path, "read_bytes", refused)
    result = ingest(library, "--sync")
    assert [Path(line["file"]).name for line in lines(result)] == ["numbers.txt"]
    assert "cats.md is left out: Permission denied" in result.stderr
    assert len(kept(state)) == 2, "what was cached of it may be right"


def test_name_that_is_no_text(library: Path, state: Path) -> None:
    (library / os.fsdecode(b"b\xff.txt")).write_text("text")
    result = ingest(library, "--glob", "*.txt")
    assert [Path(line["file"]).name for line in lines(result)] == ["numbers.txt"]
    assert "b?.txt is left out: its name is not UTF-8" in result.stderr


def test_cost_is_told_before_and_after(
    library: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvlinker.cli.documents.ingest.WORTH_A_CODEC_BYTES", 1)
    result = ingest(library / "deep", "--disk-space", "4KiB")
    (line,) = lines(result)
    nbytes = line["tokens"] * tiny_model().kv_bytes_per_token
    assert (
        f"to cache: 1 chunks, {line['tokens']} tokens: {nbytes} B of KV for 28 B of text"
        in result.stderr
    )
    assert "disk_codec int8" in result.stderr
    assert re.search(r"[\d.]+ K?B on disk for 28 B of text", result.stderr)
    assert "no room for all of it" not in result.stderr
    (library / "deep" / "more.txt").write_text("word " * 400)
    assert "no room for all of it" in ingest(library / "deep", "--disk-space", "4KiB").stderr


def test_without_a_disk(library: Path, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLINKER_DISK_SPACE", "0")
    assert len(lines(ingest(library))) == 2


def test_codec_of_the_disk(library: Path, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvlinker.cli.documents.ingest.WORTH_A_CODEC_BYTES", 1)
    result = ingest(library / "deep", "--disk-codec", "int8")
    assert "less on disk as int8" in result.stderr
    assert "takes about half" not in result.stderr


def test_progress_without_a_terminal(
    library: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvlinker.cli.documents.progress.LINE_SECONDS", 0.0)
    result = ingest(library)
    assert re.search(
        r"^kvlinker: \d+ of \d+ tokens \(\d+%\), [\d,]+ tokens/s, 0 s left: numbers.txt$",
        result.stderr,
        re.MULTILINE,
    )


def test_ttl(library: Path, state: Path) -> None:
    (cache_id,) = ids(ingest(library / "deep", "--ttl", "1000"))
    with open_state(state) as llm:
        expires_at = llm.caches.get(cache_id, tenant="default").expires_at
    assert expires_at is not None
    assert abs(expires_at - time.time() - 1000) < 30


def test_same_file_twice_is_ingested_once(library: Path, state: Path) -> None:
    assert len(lines(ingest(library / "deep", library / "deep" / "numbers.txt"))) == 1


FAILURES = [
    (["missing"], 2, "missing"),
    ([".", "--max-tokens", "0"], 2, "--max-tokens"),
    (["image.png"], 1, "no text"),
    (["blank.txt"], 1, "no text"),
    (["image.png", "--url", "SERVER"], 1, "no text"),
    ([".", "--glob", "*.rst"], 1, "no text"),
    ([".", "--glob", "/docs/*"], 2, "--glob is '/docs/*', but must be a pattern such as"),
    ([".", "--glob", "a**", "--url", "SERVER"], 2, "--glob is 'a**'"),
    (
        [".", "--method", "paragaph"],
        2,
        "--method is 'paragaph': it must be one of fixed, markdown, paragraph",
    ),
    ([".", "--ttl", "-5"], 2, "--ttl"),
    ([".", "--ttl", "1e15", "--url", "SERVER"], 1, "ttl"),
    ([".", "--max-tokens", "99999999"], 1, "'max_tokens' must be an integer"),
    ([".", "--max-tokens", "99999999", "--url", "SERVER"], 1, "split.max_tokens"),
    ([".", "--url", "http://127.0.0.1:9"], 1, "No server answers at http://127.0.0.1:9"),
]


def test_failures(
    library: Path,
    state: Path,
    served: Served,
    monkeypatch: pytest.MonkeyPatch,
    subtests: pytest.Subtests,
) -> None:
    monkeypatch.chdir(library)
    for arguments, code, complaint in FAILURES:
        with subtests.test(" ".join(arguments)):
            result = ingest(*(served.url if each == "SERVER" else each for each in arguments))
            assert result.exit_code == code
            assert complaint in result.stderr
            assert "Traceback" not in result.stderr


def test_through_a_server(library: Path, served: Served) -> None:
    arguments = (library, "--method", "markdown", "--url", served.url, "--ttl", "500")
    printed = lines(ingest(*arguments))
    assert len(printed) == 3
    for line in printed:
        entry: dict[str, Any] = served.get(f"/v1/context_caches/{line['id']}").json()
        assert (entry["metadata"]["source"], entry["tokens"]) == (line["file"], line["tokens"])
        assert entry["expires_at"] is not None
    again = ingest(*arguments)
    assert lines(again) == [line | {"new": False} for line in printed]
    assert "nothing new; 3 chunks of 2 files" in again.stderr
    (library / "cats.md").write_text("# Cats\n\nOther cats.\n")
    changed = ingest(*arguments, "--sync")
    assert [line["new"] for line in lines(changed)] == [True, False]
    assert "1 chunks cached, 2 removed" in changed.stderr
    assert served.get(f"/v1/context_caches/{printed[0]['id']}").status_code == 404


def test_file_that_a_server_does_not_split(
    library: Path, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvlinker.doors.http.context_caches.texts.MAX_INPUT_CHARACTERS", 30)
    (library / "cats.md").write_text("cat " * 8)
    result = ingest(library, "--url", served.url)
    assert [Path(line["file"]).name for line in lines(result)] == ["numbers.txt"]
    assert (
        "cats.md is left out: 'input' has 32 characters; at most 30 are split at once."
        in result.stderr
    )


def test_through_a_server_with_keys(library: Path, keyed: Served) -> None:
    file = library / "cats.md"
    refused = ingest(file, "--url", keyed.url, "--api-key", "wrong")
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "API key" in refused.stderr
    (cache_id,) = ids(ingest(file, "--url", keyed.url, "--api-key", "key-alpha"))
    url = f"/v1/context_caches/{cache_id}"
    assert keyed.get(url, headers={"Authorization": "Bearer key-alpha"}).status_code == 200
    assert lines(ingest(file, "--url", keyed.url, "--api-key", "key-beta"))[0]["new"], (
        "another tenant's are not seen"
    )


def test_tenant_of_a_key(library: Path, state: Path) -> None:
    from kvlinker.base.types.tenants import tenant_of_key

    (cache_id,) = ids(ingest(library / "deep", "--api-key", "key-alpha"))
    with open_state(state) as llm:
        assert llm.caches.get(cache_id, tenant=tenant_of_key("key-alpha")).id == cache_id
