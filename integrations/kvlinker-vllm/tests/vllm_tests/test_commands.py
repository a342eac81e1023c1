"""Both servers with vLLM serve the client that the README shows, which prints what it prints with
the embedded engine."""

import pytest

pytest.importorskip("vllm")

from tests.programs import README_CLIENT, README_URL, output_of

from kvlinker.settings import load_settings
from vllm_tests.own_server import vllm_serving
from vllm_tests.test_kills import restarting_server


@pytest.mark.whole
def test_vllms_own_server(tmp_path):
    program, shown = README_CLIENT
    with vllm_serving(
        load_settings().model, tmp_path / "log", {"state_dir": str(tmp_path / "state")}
    ) as url:
        assert output_of(program.replace(README_URL, url)) == shown


@pytest.mark.whole
def test_kvlinkers_server(tmp_path):
    """Nothing else starts vLLM as the command does."""
    program, shown = README_CLIENT
    with restarting_server(tmp_path) as (url, _):
        assert output_of(program.replace(README_URL, url)) == shown
        assert "Traceback" not in (tmp_path / "log").read_text()
