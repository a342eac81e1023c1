"""vLLM is a peer with kvlinker in it and without; its figures are not looked at."""

from dataclasses import replace

import pytest

pytest.importorskip("vllm")

from lab.tests.test_peers import CASES, LINKED_CASES, task_for

from kvlinker_lab.peers.worker import measure
from tests.doors.http.serving import tiny_model
from vllm_tests.conftest import HEAD_DIM, vllm_settings

__all__ = ["vllm_settings"]


@pytest.mark.whole
def test_vllm_is_a_peer_with_and_without_kvlinker(vllm_settings, tmp_path):
    options = vllm_settings.vllm_options
    task = task_for(
        tiny_model(head_dim=HEAD_DIM),
        tmp_path,
        vllm_options=options,
        chunk_tokens=40,
        policy="naive",
    )
    alone = measure(replace(task, peer="vllm"))
    linking = measure(replace(task, peer="kvlinker-vllm"))
    assert list(alone.seconds) == CASES
    assert list(linking.seconds) == CASES + [case.replace("24", "40") for case in LINKED_CASES]
    assert alone.logprobs == pytest.approx(measure(task).logprobs, abs=1e-3)
    assert linking.logprobs is None
    assert min(*alone.seconds.values(), *linking.seconds.values()) > 0
