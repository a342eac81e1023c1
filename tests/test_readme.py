"""The README's examples, pasted, give what it shows."""

import os
import re

import pytest

from tests.programs import README, README_EXAMPLES, README_URL, kvlinker_serve, output_of


def test_there_are_two_examples():
    assert [README_URL in program for program, _ in README_EXAMPLES] == [True, False]


@pytest.mark.whole
def test_the_client_of_a_server(tmp_path):
    program, shown = README_EXAMPLES[0]
    with kvlinker_serve([], os.environ | {"KVLINKER_STATE_DIR": str(tmp_path)}) as url:
        assert output_of(program.replace(README_URL, url)) == shown
        (again,) = re.findall(r"A second run ends with `([\d ]+)`", README)
        assert output_of(program.replace(README_URL, url)) == f"{shown.splitlines()[0]}\n{again}\n"


def test_the_library(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLINKER_STATE_DIR", str(tmp_path))
    program, shown = README_EXAMPLES[1]
    for _ in range(2):
        assert output_of(program) == shown, "a second run prints the same"
