"""Both commands serve the client that the README shows, and it prints what it prints with the embedded engine."""

import os

import pytest

pytest.importorskip("vllm")

from kvlinker.config import load_settings
from tests.programs import README_EXAMPLES, README_URL, kvlinker_serve, output_of
from tests.vllm.own_server import vllm_serving

(PROGRAM, SHOWN), _ = README_EXAMPLES
OPTIONS = '{"enforce_eager": true, "gpu_memory_utilization": 0.05}'


def assert_served(url):
    assert output_of(PROGRAM.replace(README_URL, url)) == SHOWN


@pytest.mark.slow
def test_kvlinker_serve(tmp_path):
    arguments = ["--engine", "vllm", "--vllm-options", OPTIONS, "--state-dir", str(tmp_path / "state")]
    with kvlinker_serve(arguments, os.environ) as url:
        assert_served(url)


@pytest.mark.slow
def test_vllms_own_server(tmp_path):
    with vllm_serving(load_settings().model, tmp_path / "log", {"state_dir": str(tmp_path / "state")}) as url:
        assert_served(url)
