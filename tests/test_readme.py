"""The README's examples, pasted, give what it shows."""

import os

import pytest

from tests.programs import README_EXAMPLES, README_URL, kvlinker_serve, output_of


@pytest.mark.parametrize("number", [0, 1])
def test_examples(number, tmp_path):
    assert len(README_EXAMPLES) == 2
    program, shown = README_EXAMPLES[number]
    environment = os.environ | {"KVLINKER_STATE_DIR": str(tmp_path)}
    if README_URL in program:
        with kvlinker_serve([], environment) as url:
            printed = output_of(program.replace(README_URL, url), environment)
    else:
        printed = output_of(program, environment)
    assert printed == shown
