"""The programs in ``integrations/examples`` run against a server, and print what they promise."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def printed_by(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Run an example as ``python integrations/examples/NAME`` does, and return what it prints."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def test_langgraph_workflow(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed_by("langgraph_workflow.py", capsys)
    assert text.splitlines() == ["reader: Varna", "writer: Oslo"]


def test_openai_agents(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed_by("openai_agents.py", capsys)
    found = re.findall(r"(\w+): (\w+) \((\d+) tokens cached\)", text)
    assert [each[:2] for each in found] == [("reader", "Varna"), ("writer", "Oslo")]
    assert all(int(cached) >= 8 for *_, cached in found)


@pytest.mark.usefixtures("facts")
def test_langchain_agent(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The toy in the box may call a tool of its own accord, and finds nothing: ``test_agent`` makes
    it find something."""
    assert printed_by("langchain_agent.py", capsys).strip()


def test_llamaindex_engine(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed_by("llamaindex_engine.py", capsys)
    assert text.startswith("Oslo\n  cc_")


def test_haystack_pipeline(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed_by("haystack_pipeline.py", capsys)
    assert re.findall(r"live\? (\w+) \((\d+) tokens cached\)", text)[1][0] == "Varna"
    assert text.startswith("Where does Tom Reyes live? Oslo")


def test_dspy_program(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed_by("dspy_program.py", capsys)
    cached = [int(number) for number in re.findall(r"(\d+) of them cached", text)]
    assert len(cached) == 3
    assert cached[2] > cached[0]
