"""Embeddings of n-grams are made of ids as of what is convolved."""

import pytest
import torch

from kvlinker.engines.embedded.model.states.stepping import of_tokens_before
from tests.toy_models import VOCABULARY, tiny_model

END = 257


@pytest.fixture(scope="module")
def embedding():
    model = tiny_model("qwen4_exp-blocks-states-ngrams")
    return model.model.layers[0].ple.ple_embedding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_each_is_that_of_the_text_in_steps_too(embedding, dtype):
    """Wherever a step ends, behind the end of a text, too; chunks and states may be in bf16."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCABULARY, (1, 40), generator=generator)
    ids[0, [11, 12, 30]] = torch.tensor([END, VOCABULARY - 1, END])
    expected = embedding(ids, None).transpose(1, 2)
    before, found = None, []
    for begin, end in ((0, 1), (1, 12), (12, 13), (13, 40)):
        call = of_tokens_before(type(embedding).forward, embedding, ids[:, begin:end])
        before = call.hidden.new_zeros(1, 2, 2).to(dtype) if before is None else before
        entering = call.hidden.to(dtype)
        found.append(call.apply(before, entering))
        before = torch.cat([before, entering], -1)[..., -2:]
    assert torch.equal(torch.cat(found, -1), expected)
