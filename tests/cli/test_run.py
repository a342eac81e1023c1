"""``kvlinker run``: a conversation in the terminal, with a server that runs or a new one."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from kvlinker.base.errors import KVLinkerError
from kvlinker.cli import app
from kvlinker.cli.chat import rendering
from kvlinker.cli.chat.conversation import Conversation, Written
from kvlinker.cli.running import running_servers
from kvlinker.llm import LLM
from tests.doors.http.serving import CONTEXT_WINDOW, Served, serving, tiny_model, tiny_settings
from tests.waiting import PATIENCE


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    settings = tiny_settings(tmp_path_factory.mktemp("state"), max_answer_tokens=12)
    with serving(LLM.from_model(tiny_model(), settings), settings) as running:
        yield running


@pytest.fixture
def conversation(served: Served) -> Conversation:
    return Conversation(served.url, None)


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / "people.md").write_text("Tom Reyes lives in Oslo.\n")
    (folder / "picture.png").write_bytes(b"\x89PNG\0\0")
    return folder


def answer(conversation: Conversation, question: str) -> str:
    return "".join(written.text for written in conversation.ask(question))


def run(question: str, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["run", *arguments], input=question)


def test_answers_and_figures(conversation: Conversation) -> None:
    answer(conversation, "Who are you?")
    first = conversation.figures
    assert first is not None
    # the model's own sampling may end an answer early, before there is text
    assert first.cached == 0
    assert 1 <= first.output <= 12
    answer(conversation, "And who am I?")
    second = conversation.figures
    assert second is not None
    assert second.prompt > first.prompt + first.output, "what was said is in the prompt"
    assert re.search(r"prompt \d+ tokens: .* new; first token .* s; answer \d+ tokens", str(second))
    conversation.clear()
    answer(conversation, "Who are you?")
    assert conversation.figures is not None
    assert conversation.figures.prompt == first.prompt


def test_documents_are_linked(conversation: Conversation, served: Served, notes: Path) -> None:
    chunks, left_out = conversation.use_documents(notes)
    assert chunks == 1
    assert "picture.png is left out" in left_out[0]
    answer(conversation, "Where does Tom Reyes live?")
    assert [hit.text for hit in conversation.read] == ["Tom Reyes lives in Oslo.\n"]
    assert conversation.figures is not None
    assert conversation.figures.cached > 0
    conversation.leave_documents()
    answer(conversation, "Where does Tom Reyes live?")
    assert conversation.read == []


def test_documents_of_other_folders_are_not_read(
    conversation: Conversation, notes: Path, tmp_path: Path
) -> None:
    conversation.use_documents(notes)
    other = tmp_path / "other"
    other.mkdir()
    (other / "mira.txt").write_text("Mira Holt lives in Varna.")
    conversation.use_documents(other)
    answer(conversation, "Where does Tom Reyes live?")
    assert [hit.text for hit in conversation.read] == ["Mira Holt lives in Varna."]


def test_folders_without_documents(conversation: Conversation, tmp_path: Path) -> None:
    with pytest.raises(KVLinkerError, match="There is no folder"):
        conversation.use_documents(tmp_path / "none")
    with pytest.raises(KVLinkerError, match="no text to read"):
        conversation.use_documents(tmp_path)


def test_a_conversation_that_is_too_long_forgets_its_beginning(conversation: Conversation) -> None:
    long = "word " * (CONTEXT_WINDOW // 12)
    prompts = []
    for _ in range(4):
        answer(conversation, long)
        assert conversation.figures is not None
        prompts.append(conversation.figures.prompt)
    assert prompts == sorted(prompts)
    assert prompts[-1] < CONTEXT_WINDOW
    with pytest.raises(KVLinkerError):
        answer(conversation, "word " * CONTEXT_WINDOW)


def test_an_answer_that_is_cancelled_is_kept_as_far_as_it_came(conversation: Conversation) -> None:
    pieces = conversation.ask("Who are you?")
    begun = next(pieces).text
    pieces.close()  # type: ignore[attr-defined]
    assert conversation._messages[-1] == {"role": "assistant", "content": begun}
    assert conversation.figures is None


def test_scripts_get_plain_text(served: Served, notes: Path) -> None:
    result = run(
        f"/docs {notes}\n/policy naive\nWhere does Tom\nReyes live?\n", "--url", served.url
    )
    assert result.exit_code == 0, result.stderr
    assert "\x1b" not in result.output
    assert "1 chunks" in result.stderr
    assert "policy naive" in result.stderr
    assert "read people.md" in result.stderr
    assert result.stdout.strip()


def test_scripts_that_ask_nothing_or_wrongly(served: Served) -> None:
    for text, said in (
        ("", "there is no question"),
        ("/policy foo\nHello", "Unknown policy 'foo'"),
        ("/nonsense\nHello", "'/nonsense' is no command here"),
        ("/docs /nowhere\nHello", "There is no folder"),
    ):
        result = run(text, "--url", served.url)
        assert result.exit_code == 1
        assert said in result.stderr
        assert result.stdout == ""


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "nonsense"}')
    result = run("Hello", str(model), "--state-dir", str(tmp_path / "state"))
    assert result.exit_code == 1
    assert "The server has not started; its log" in result.stderr
    assert "nonsense" in result.stderr


class Terminal:
    """A command in a pseudo terminal."""

    def __init__(self, *arguments: str) -> None:
        self._main, end = pty.openpty()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvlinker", *arguments],
            stdin=end,
            stdout=end,
            stderr=end,
            env=os.environ | {"TERM": "xterm", "COLUMNS": "80", "LINES": "24"},
            start_new_session=True,
        )
        os.close(end)
        self._shown = ""

    def read(self, mark: str) -> str:
        """Return what is shown next, up to a text that comes, or to the end of the process."""
        while mark not in self._shown:
            try:
                self._shown += os.read(self._main, 4096).decode()
            except OSError:  # the process has ended
                break
        before, found, self._shown = self._shown.partition(mark)
        return before + found

    def write(self, text: str) -> None:
        os.write(self._main, text.encode())

    def wait(self) -> int:
        return self._process.wait(PATIENCE)


@pytest.mark.whole
def test_in_a_terminal(served: Served, notes: Path) -> None:
    terminal = Terminal("run", "--url", served.url)
    assert "/help lists" in terminal.read(">>> ")
    for line, shown in (
        (f"/docs {notes}", "1 chunks of"),
        ("Where does Tom Reyes live?", "read people.md"),
        ("/policy foo", "Unknown policy 'foo'"),
        ("/help", "/docs FOLDER"),
    ):
        terminal.write(f"{line}\n")
        assert shown in terminal.read(shown)
        terminal.read(">>> ")
    terminal.write("\x04")
    assert terminal.wait() == 0


@pytest.mark.whole
def test_a_server_is_started_joined_and_stopped(tmp_path: Path) -> None:
    options = ["--state-dir", str(tmp_path / "state")]
    command = [sys.executable, "-m", "kvlinker"]
    asked = {"text": True, "capture_output": True, "check": True, "timeout": 3 * PATIENCE}
    question = "Mira Holt lives in Varna.\n\nQuestion: Where does Mira Holt live?"
    try:
        first = subprocess.run([*command, "run", *options], input=question, **asked)  # type: ignore[call-overload]
        (server,) = running_servers(tmp_path / "state")
        assert f"The server {server.pid} runs on after this" in first.stderr
        second = subprocess.run([*command, "run", *options], input=question, **asked)  # type: ignore[call-overload]
        assert "runs on after this" not in second.stderr
        assert first.stdout.strip() == second.stdout.strip() == "Varna"
    finally:
        stopped = CliRunner().invoke(app, ["stop", *options])
    assert stopped.stdout == f"{server.pid} stopped\n"
    assert running_servers(tmp_path / "state") == []


def test_markdown_is_shown_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """What remains on the screen is each block once, as a whole."""
    screen = Console(file=StringIO(), width=60, force_terminal=False)
    monkeypatch.setattr(rendering, "REFRESH_SECONDS", 0.0)
    monkeypatch.setattr(rendering, "Console", lambda: screen)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    text = "# Fruit\n\n* an *apple*\n* a pear\n\n```python\nprint('plum')\n\nprint(1)\n```\n\nDone."

    def pieces() -> Iterator[Written]:
        yield Written("Let me think.", True)
        for start in range(0, len(text), 3):
            yield Written(text[start : start + 3], False)

    rendering.show_answer(pieces())
    assert isinstance(screen.file, StringIO)
    shown = [line.strip() for line in screen.file.getvalue().splitlines() if line.strip()]
    assert shown[0] == "Let me think."
    assert shown[1] == "Fruit"
    assert shown[-5:] == ["• an apple", "• a pear", "print('plum')", "print(1)", "Done."]
