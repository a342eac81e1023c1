"""Answers from KV that a tier keeps in fewer bits are close to those from the KV itself."""

from functools import partial

import pytest

from kvlinker.store import DiskTier
from kvlinker.store.format.codecs import find_codec, known_codecs
from tests.engines.embedded.conftest import linked_prompt

PROMPT = linked_prompt(40, 33, middle=3)
OFF_BY = {"raw": 0.0, "int8": 0.05, "int4": 1.0}
"""Most that the log probability of the first token may be off, in nats: the model is tiny, and
knows little."""


def on_disk(folder, codec, events):
    return [DiskTier(folder, 1 << 28, events, codec=find_codec(codec))]


@pytest.mark.parametrize("family", ["llama", "deepseek_v3-latents-interleaved"])
@pytest.mark.parametrize("codec", known_codecs())
def test_answers_survive_the_codec(bench, tmp_path, codec, family):
    first = bench(family, slower=partial(on_disk, tmp_path, codec))
    first.cache(PROMPT)
    first.store.flush()
    exact = first.answer(PROMPT, "naive")
    second = bench(family, slower=partial(on_disk, tmp_path, codec))
    stored = second.answer(PROMPT, "naive", max_tokens=1)
    assert stored.logprobs[0] == pytest.approx(
        exact.logprobs[0], abs=OFF_BY[codec.removesuffix("+zstd")]
    )
    assert second.store.usage()[1].chunks == 2
