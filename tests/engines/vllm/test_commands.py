"""vLLM's own server serves the client that the README shows, which prints what it prints with the
embedded engine.

So does ``kvlinker serve``, in ``test_kills``.
"""

import pytest

pytest.importorskip("vllm")

from kvlinker.settings import load_settings
from tests.engines.vllm.own_server import vllm_serving
from tests.programs import README_EXAMPLES, README_URL, output_of


@pytest.mark.slow
def test_vllms_own_server(tmp_path):
    program, shown = README_EXAMPLES[0]
    with vllm_serving(
        load_settings().model, tmp_path / "log", {"state_dir": str(tmp_path / "state")}
    ) as url:
        assert output_of(program.replace(README_URL, url)) == shown
