"""The README's examples, pasted, give what it shows."""

import os
import re

import pytest

from tests.programs import (
    README,
    README_APPLICATION,
    README_CLIENT,
    README_LIBRARY,
    README_URL,
    kvlinker_serve,
    output_of,
)


@pytest.mark.whole
def test_an_application_that_changes_nothing(tmp_path):
    """How many tokens are cached depends on what the server computes between two questions."""
    program, shown = README_APPLICATION
    answers = re.compile(r"^(\w+): (\d+) of (\d+) tokens cached$", re.MULTILINE)
    expected = answers.findall(shown)
    environment = os.environ | {"KVLINKER_STATE_DIR": str(tmp_path)}
    with kvlinker_serve(["--implicit", "auto"], environment) as url:
        found = answers.findall(output_of(program.replace(README_URL, url)))
    assert [(name, length) for name, _, length in found] == [
        (name, length) for name, _, length in expected
    ]
    cached = [int(tokens) for _, tokens, _ in found]
    assert cached[0] == 0
    assert cached[-1] > int(found[-1][2]) / 2


@pytest.mark.whole
def test_the_client_of_a_server(tmp_path):
    program, shown = README_CLIENT
    with kvlinker_serve([], os.environ | {"KVLINKER_STATE_DIR": str(tmp_path)}) as url:
        assert output_of(program.replace(README_URL, url)) == shown
        (again,) = re.findall(r"A second run ends with `([\d ]+)`", README)
        assert output_of(program.replace(README_URL, url)) == f"{shown.splitlines()[0]}\n{again}\n"


def test_the_library(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLINKER_STATE_DIR", str(tmp_path))
    program, shown = README_LIBRARY
    assert output_of(program) == shown
    told = re.search(r"A second run ends with `(exact_cached_tokens=\d+)`", README)
    assert told is not None
    answer, usage = output_of(program).splitlines()
    assert answer == shown.splitlines()[0]
    assert usage.endswith(f", {told[1]})")
