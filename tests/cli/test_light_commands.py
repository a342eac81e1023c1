"""Commands that only look into a state directory start at once: they import no PyTorch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvlinker.engines.contract import known_models
from kvlinker.engines.contract.known_models import remember_fingerprint
from kvlinker.llm import LLM
from kvlinker.service.state import search_by_words
from kvlinker.settings import Settings, load_settings
from tests.doors.http.serving import tiny_model, tiny_settings

COMMANDS = """
import sys
from kvlinker.cli import app
for command in sys.argv[2:]:
    try:
        app([*command.split(), "--state-dir", sys.argv[1]])
    except SystemExit as ended:
        print(command, "ended with", ended.code)
print(*({"torch", "transformers", "fastapi"} & sys.modules.keys()), "loaded")
"""


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """The settings of a state directory with one context cache, made with a model that was
    loaded."""
    model = tiny_model()
    settings = load_settings(state_dir=tmp_path / "state")
    with LLM.from_model(model, tiny_settings(settings.state_dir)) as llm:
        llm.generate_context_cache(["Mira Holt lives in Varna."], name="people")
    remember_fingerprint(settings, model.fingerprint)
    return settings


def search(settings: Settings, query: str) -> list[str] | None:
    found = search_by_words(settings, query, tenant="default", limit=3, metadata={})
    return None if found is None else [hit.text for hit in found]


def test_they_need_no_model(settings: Settings) -> None:
    commands = (
        "caches ls",
        "caches usage",
        "search Varna",
        "caches rm --all --yes",
        "caches usage",
    )
    run = subprocess.run(
        [sys.executable, "-c", COMMANDS, str(settings.state_dir), *commands],
        capture_output=True,
        text=True,
        check=True,
    )
    said = run.stdout
    assert said.splitlines()[-1].strip() == "loaded", said
    assert said.count("ended with 0") == len(commands), said + run.stderr
    assert "people" in said
    assert "Mira Holt lives in Varna." in said
    assert "1 removed" in said


def test_searching_by_words_without_the_model(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert search(settings, "who lives there") == ["Mira Holt lives in Varna."]
    assert search(settings, "nothing of it") == []
    for other in ({"dtype": "float32"}, {"embedding_model": "a"}, {"search": "off"}):
        assert search(settings.model_copy(update=other), "lives") is None
    monkeypatch.setattr(known_models, "version", lambda _: "another")
    assert search(settings, "lives") is None


def test_a_damaged_memory_of_the_model_is_none(settings: Settings) -> None:
    (file,) = (settings.state_dir / known_models.FOLDER).iterdir()
    whole = file.read_text()
    for damaged in ("", whole[:-1], whole.replace(whole[0], "x", 1)):
        file.write_text(damaged)
        assert search(settings, "lives") is None
