"""The packed forward pass gives what linking done slowly gives: each chunk computed alone, its KV
put in its place."""

import numpy as np
import pytest
import torch

from kvlinker.engines.embedded.model.oracles.masked import Oracle
from tests.engines.embedded.conftest import linked_prompt
from tests.engines.embedded.reference import Reference
from tests.toy_models import tiny_model

FAMILIES = [
    "llama",
    "mistral-window",
    "gemma3",
    "gpt_oss-sinks",
    "cohere2-interleaved-nope",
    "yarn",
    "deepseek_v3-latents-interleaved",
    "deepseek_v2-latents-interleaved",
    "longcat-latents-interleaved",
]
BEHIND = 11


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("moved", [0, 1500])
def test_linked_logits_are_those_of_chunks_computed_alone(family, moved):
    """Windows of 48 tokens are crossed, and chunks are neighbours or have fresh tokens between
    them."""
    prompt = linked_prompt(50, 21, 33, fresh=BEHIND, header=5, middle=3)
    spans = [(span.start, span.end) for span in prompt.spans]
    oracle = Oracle(tiny_model(family), prompt.tokens, BEHIND)
    linked = oracle.linked_logits(spans, moved=moved)
    reference = Reference(prompt, family)
    expected = reference.run([np.zeros(len(prompt), dtype=bool)]).logits[-BEHIND:]
    torch.testing.assert_close(linked, expected, rtol=1e-4, atol=2e-5)
    assert float((linked - oracle.logits).norm() / linked.norm()) > 1e-2  # else nothing was tested


def test_without_chunks_the_oracle_is_the_model():
    oracle = Oracle(tiny_model("gemma3"), np.arange(3, 99), 96)
    assert torch.equal(oracle.linked_logits([]), oracle.logits)
