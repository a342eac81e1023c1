"""``kvlinker search`` and ``kvlinker ask``, here and through a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kvlinker.cli import app
from kvlinker.llm import LLM, Answer
from tests.doors.http.serving import TEMPLATE, Served, tiny_model, tiny_settings

PEOPLE = (
    "Mira Holt lives in Varna. She works as a baker.\n\nTom Reyes lives in Oslo. He works as a"
    " pilot."
)


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state directory of commands in this process, on the tiny model."""
    monkeypatch.setattr("kvlinker.service.startup.load_model", lambda *_: tiny_model())
    monkeypatch.setenv("KVLINKER_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("KVLINKER_CHAT_TEMPLATE", TEMPLATE)
    return tmp_path / "state"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


def ingest(folder: Path, *options: object) -> list[str]:
    """The ids of the two chunks of a file."""
    folder.mkdir(exist_ok=True)
    (folder / "people.md").write_text(PEOPLE)
    done = run("ingest", folder, "--method", "paragraph", *options)
    assert done.exit_code == 0, done.stderr
    return [json.loads(line)["id"] for line in done.stdout.splitlines()]


def test_search(tmp_path: Path, state: Path) -> None:
    ids = ingest(tmp_path / "docs")
    found = run("search", 'Where does "Tom NEAR(Reyes live?', "--limit", 1)
    assert found.exit_code == 0, found.stderr
    place, text = found.stdout.rstrip().splitlines()
    assert place.startswith(f"{ids[1]}  100%  ")
    assert place.endswith(f"{tmp_path}/docs/people.md, characters 49 to {len(PEOPLE)}")
    assert text == "    Tom Reyes lives in Oslo. He works as a pilot."
    printed = run("search", "lives", "--json", "--metadata", "index=0")
    (hit,) = [json.loads(line) for line in printed.stdout.splitlines()]
    assert (hit["id"], hit["text"], hit["metadata"]["end"]) == (ids[0], PEOPLE[:49], "49")


def test_search_of_nothing(tmp_path: Path, state: Path) -> None:
    ingest(tmp_path / "docs")
    for command in ("search", "ask"):
        missed = run(command, "zebra")
        assert (missed.exit_code, missed.stdout) == (1, "")
        assert (
            "nothing that is cached matches 'zebra'; `kvlinker ingest PATH` caches files"
            in missed.stderr
        )
        for text in ("???", "", " "):
            refused = run(command, text)
            assert (refused.exit_code, refused.stdout) == (2, "")
            argument = "QUERY" if command == "search" else "QUESTION"
            assert (
                f"{argument} is {text!r}, without a word to search for; write some"
                in refused.stderr
            )
        assert run(command, "lives", "--metadata", "index").exit_code == 2
        assert run(command, "lives", "--metadata", "index=7").exit_code == 1


def test_matches_are_told_in_percent_of_the_best(tmp_path: Path, state: Path) -> None:
    """BM25's own scores are near 0 where few texts are there, or most of them have the words."""
    folder = tmp_path / "docs"
    folder.mkdir()
    texts = (
        "Tom Reyes lives in Oslo.",
        "Tom swims.",
        "Mira lives.",
        "Bo lives.",
        "Cy lives.",
        "Di lives.",
    )
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_text(text)
    assert run("ingest", folder).exit_code == 0
    found = run("search", "Where does Tom live?").stdout
    told = [line.split()[1] for line in found.splitlines() if line.startswith("cc_")]
    scores = [
        json.loads(line)["score"]
        for line in run("search", "Where does Tom live?", "--json").stdout.splitlines()
    ]
    assert told == ["100%", f"{scores[1] / scores[0]:.0%}", *["<1%"] * 4]


def test_context_caches_without_a_name_are_of_no_place(served: Served) -> None:
    (cache,) = served.cache("Zebras graze in Zambia.")
    url = ("--url", served.url)
    asked = run("ask", "Where do zebras graze?", "--max-tokens", 2, *url)
    assert asked.exit_code == 0, asked.stderr
    tokens = len(served.llm.read_cache(cache).token_ids)
    assert f"kvlinker: read {cache} ({tokens} tokens)\n" in asked.stderr
    assert run("search", "zebras", *url).stdout.splitlines()[0] == f"{cache}  100%"


@pytest.mark.parametrize("command", [("search", "a"), ("ask", "a"), ("ingest", __file__)])
def test_a_key_that_is_missing_is_asked_for(keyed: Served, command: tuple[str, ...]) -> None:
    refused = run(*command, "--url", keyed.url)
    assert refused.exit_code == 1
    assert "Missing or unknown API key." in refused.stderr
    assert "--api-key of a command" in refused.stderr


@pytest.mark.parametrize("command", [("search", "a"), ("ask", "a"), ("ingest", __file__)])
def test_a_server_that_does_not_answer_is_named(command: tuple[str, ...]) -> None:
    missed = run(*command, "--url", "http://127.0.0.1:9")
    assert missed.exit_code == 1
    assert "No server answers at http://127.0.0.1:9: " in missed.stderr
    wrong = run(*command, "--url", "nowhere")
    assert (wrong.exit_code, "is no address of a server" in wrong.stderr) == (1, True)


@pytest.mark.parametrize(
    "command", [("serve", "--port", "0"), ("search", "a"), ("ask", "a"), ("ingest", __file__)]
)
def test_a_model_that_is_nowhere_is_told_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setattr("kvlinker.llm.LLM.from_settings", lambda _: pytest.fail("it was loaded"))
    missed = run(*command, "--model", "models/of/mine")
    assert missed.exit_code == 1
    assert "No model at models/of/mine: there is no such folder." in missed.stderr


def test_search_that_is_off(tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ingest(tmp_path / "docs")
    monkeypatch.setenv("KVLINKER_SEARCH", "off")
    for command in ("search", "ask"):
        off = run(command, "lives")
        assert (off.exit_code, "search=on" in off.stderr) == (1, True)
    monkeypatch.delenv("KVLINKER_SEARCH")
    assert run("search", "lives").exit_code == 0


def test_ask(tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chunks that match are linked, the best next to the question."""
    ids = ingest(tmp_path / "docs")
    asked = []
    chat = LLM.chat_completion

    def noted(llm: LLM, messages: list, **options: Any) -> Answer:
        asked.append((messages, options))
        return chat(llm, messages, **options)

    monkeypatch.setattr(LLM, "chat_completion", noted)
    done = run("ask", "Where does Tom Reyes live?", "--policy", "naive", "--max-tokens", 3)
    assert done.exit_code == 0, done.stderr
    (((message,), options),) = asked
    first, second, newline, question = message["content"]
    assert [first.id, second.id, newline, question] == [
        *ids,
        "\n",
        "Question: Where does Tom Reyes live?",
    ]
    assert (options["policy"], options["max_tokens"], options["temperature"]) == ("naive", 3, 0)
    assert [line.split()[2] for line in done.stderr.splitlines()] == [ids[1], ids[0]]
    run("ask", "Where does Tom Reyes live?", "--limit", 1, "--max-tokens", 3)
    assert asked[-1][0][0]["content"][0].id == ids[1]


def test_ask_leaves_out_what_has_no_room(tmp_path: Path, state: Path) -> None:
    with LLM.from_model(tiny_model(), tiny_settings(state)) as llm:
        long, short = llm.generate_context_cache(["cat " * 700, "cat " * 400])
        assert long.tokens + short.tokens > llm.max_model_len - 1000
    done = run("ask", "cat?", "--max-tokens", 1000)
    assert done.exit_code == 0, done.stderr
    assert done.stderr.count("kvlinker: read") == 1
    refused = run("ask", "cat?", "--max-tokens", 3000)
    assert (refused.exit_code, refused.stdout) == (1, "")


def test_through_a_server(tmp_path: Path, keyed: Served) -> None:
    alpha, beta = (("--url", keyed.url, "--api-key", f"key-{name}") for name in ("alpha", "beta"))
    ids = ingest(tmp_path / "docs", *alpha)
    found = run("search", "Reyes", *alpha)
    assert found.stdout.startswith(ids[1])
    assert run("search", "Reyes", *beta).exit_code == 1
    assert run("ask", "Where does Reyes live?", "--max-tokens", 2, *beta).exit_code == 1
    done = run("ask", "Where does Reyes live?", "--max-tokens", 2, *alpha)
    assert done.exit_code == 0, done.stderr
    assert f"read {ids[1]}" in done.stderr
