"""With an fp8 KV cache, linked answers are as far from the oracle's as vLLM's own."""

import numpy as np
import pytest

pytest.importorskip("vllm")

from tests.engines.embedded.conftest import linked_prompt

from vllm_tests.linked_vllm import LinkedVLLM, difference, difference_from, reference


@pytest.mark.whole
def test_linking_adds_no_error_to_that_of_fp8(tmp_path):
    """Placed KV is rounded as computed KV is; chunks are stored as they were computed."""
    linked = LinkedVLLM(
        "llama",
        tmp_path / "models",
        tmp_path / "state",
        kv_cache_dtype="fp8",
        num_gpu_blocks_override=64,
    )
    errors: dict[str, list[float]] = {"full": [], "naive": [], "legolink-16": [], "query-10": []}
    for seed in range(4):
        prompt = linked_prompt(97, 156, 61, header=5, seed=seed)
        linked.cache(prompt)
        for policy in ("full", "naive", "legolink-16"):
            errors[policy].append(
                difference(linked.answer(prompt, policy), prompt, policy, "llama")
            )
        link = linked.refined(prompt, "query-10")
        oracle = reference(prompt, "llama")
        found = difference_from(
            linked.follow(link), oracle, [link.plan.selections[0]] * oracle.layers
        )
        errors["query-10"].append(found)
    linked.settle()
    linked.close()
    rounded = {policy: float(np.median(values)) for policy, values in errors.items()}
    assert 0.01 < rounded["full"] < 1
    assert all(value < 1.5 * rounded["full"] for value in rounded.values()), rounded
