"""The programs in ``examples/`` run on the model in the box, and print what they promise."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvlinker.engines.embedded.model_loading import load_model
from kvlinker.linking import registry
from kvlinker.llm import LLM
from kvlinker.settings import load_settings
from tests.doors.http.serving import serving

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(autouse=True, scope="module")
def _one_model() -> Iterator[None]:
    """The model in the box is loaded once for all."""
    loaded = load_model(load_settings())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvlinker.service.startup.load_model", lambda *_: loaded)
        yield


@pytest.fixture(autouse=True)
def _own_registry_and_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Policies that examples register are gone afterwards, and each example has a state directory
    of its own."""
    monkeypatch.setattr(registry._registry, "_values", dict(registry.known_policies()))
    monkeypatch.setenv("KVLINKER_STATE_DIR", str(tmp_path / "state"))


def printed_by(name: str, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run the example as ``python examples/NAME`` does, in this process, and return what it
    prints."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def test_conversation(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed_by("conversation.py", capsys)
    assert text.count("Where does Tom Reyes live? Oslo\n") == 2
    assert text.count("Where does Mira Holt live? Varna\n") == 2
    found = re.findall(r"(\d+) tokens cached, (\d+) recomputed, (\d+) fresh", text)
    assert found == [("37", "8", "13"), ("52", "0", "6")] * 2, (
        "the second question finds the chunks linked"
    )


def test_server_client(capsys: pytest.CaptureFixture[str]) -> None:
    settings = load_settings()
    with serving(LLM.from_settings(settings), settings) as served:
        text = printed_by("server_client.py", capsys, served.url)
    assert text == "Oslo\n41 prompt tokens, 24 of them cached, 4 recomputed\n"


def test_agents(capsys: pytest.CaptureFixture[str]) -> None:
    settings = load_settings()
    with serving(LLM.from_settings(settings), settings) as served:
        text = printed_by("agents.py", capsys, served.url)
    assert text.startswith("reader: Varna, 1 context caches in the prompt\nwriter: ")
    assert text.endswith(", 2 context caches in the prompt\n"), "its own, and what was handed over"


def test_structured_answers(capsys: pytest.CaptureFixture[str]) -> None:
    settings = load_settings()
    with serving(LLM.from_settings(settings), settings) as served:
        text = printed_by("structured_answers.py", capsys, served.url)
    assert text == "{'city': 'Oslo'}\nbaker\n"


def test_own_policy(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed_by("own_policy.py", capsys)
    assert re.findall(r"^(\S+) +(\d+) tokens recomputed: Oslo$", text, re.MULTILINE) == [
        ("naive", "0"),
        ("chunk-ends-4", "4"),
        ("legolink-4+chunk-ends-4", "7"),
        ("full", "14"),
    ]


def test_ingest_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = (str(EXAMPLES / "notes"), str(tmp_path / "kept"))
    text = printed_by("ingest_folder.py", capsys, *arguments)
    assert re.search(r"^people\.md: \d+ chunks, \d+ tokens$", text, re.MULTILINE)
    assert text.endswith("\nOslo\n")
    chunks = set((tmp_path / "kept" / "chunks").glob("??/*.safetensors"))
    assert chunks
    assert printed_by("ingest_folder.py", capsys, *arguments).endswith("\nOslo\n")
    assert set((tmp_path / "kept" / "chunks").glob("??/*.safetensors")) == chunks, (
        "the same text again shares its KV"
    )


def test_explain_link(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed_by("explain_link.py", capsys)
    assert re.findall(r"^\S+$", text, re.MULTILINE) == ["legolink-4", "query-10", "cacheblend-20"]
    assert text.count(": chunk cc_") == 6
    assert "layers 0 to 5 recompute 16 to 20\n" in text
    assert re.findall(r"(\d+)% of a full prefill", text) == ["42", "69", "42"]


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("langchain_chain", "langchain_openai"),
        ("llamaindex_engine", "llama_index.llms.openai_like"),
    ],
)
def test_frameworks_reuse_documents(
    name: str, package: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """They join their documents into one string, in three orders: the second brings chunks, and the
    third has them, under a policy that waits for no idle time."""
    pytest.importorskip(package)
    settings = load_settings(implicit="auto", implicit_ahead="off", policy="query-5-sensitive")
    with serving(LLM.from_settings(settings), settings) as served:
        text = printed_by(f"{name}.py", capsys, served.url)
    first, second, third = re.findall(r"(\d+) prompt tokens, (\d+) of them cached", text)
    assert int(first[1]) == 0
    assert int(second[1]) < 0.3 * int(second[0]), "they are computed alone, once"
    assert int(third[1]) > 0.6 * int(third[0])


def test_every_example_is_tested() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.py")} - {"langchain_chain", "llamaindex_engine"}
    assert names == {
        name.removeprefix("test_") for name in globals() if name.removeprefix("test_") in names
    }
    assert all(20 <= len(path.read_text().splitlines()) <= 55 for path in EXAMPLES.glob("*.py"))
