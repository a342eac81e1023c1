"""``python -m kvlinker_lab.gpu.lmcache SHAPE CHUNKS CHUNK_TOKENS FILE``: times first tokens in vLLM
with LMCache's blending, where its package is there."""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

SEPARATOR = " # # "
"""The text at which LMCache cuts a prompt into chunks."""

RECOMPUTED = 0.15
"""The share of tokens that it computes again: the paper's."""

SETTINGS = {
    "LMCACHE_CHUNK_SIZE": "256",
    "LMCACHE_ENABLE_BLENDING": "True",
    "LMCACHE_BLEND_SPECIAL_STR": SEPARATOR,
    "LMCACHE_BLEND_CHECK_LAYERS": "1",
    "LMCACHE_BLEND_RECOMPUTE_RATIOS": str(RECOMPUTED),
    "LMCACHE_USE_LAYERWISE": "True",
    "LMCACHE_LOCAL_CPU": "True",
    "LMCACHE_MAX_LOCAL_CPU_SIZE": "8",
}
FRESH_TOKENS = 64
"""The tokens behind the chunks. Chosen by hand."""

REPEAT = 3
"""The measurements of which the median counts."""

Generate = Callable[[list[int]], object]
"""Computes a prompt and its first token."""


def prompts_of(
    chunks: int, chunk_tokens: int, separator: Sequence[int], vocabulary: int
) -> Iterator[list[int]]:
    """Yield prompts of the same random chunks, each in another order, and with another question;
    the first is in the order in which they were made."""
    generator = np.random.default_rng(0)
    made = generator.integers(0, vocabulary, (chunks, chunk_tokens)).tolist()
    order = list(range(chunks))
    while True:
        tokens = [token for number in order for token in (*made[number], *separator)]
        yield tokens + generator.integers(0, vocabulary, FRESH_TOKENS).tolist()
        order = generator.permutation(chunks).tolist()


def measure(generate: Generate, prompts: Iterator[list[int]]) -> list[dict[str, Any]]:
    """Return a row for the first prompt, which nothing is known of, and one for those that have its
    chunks in other orders, behind one that warms up."""

    def seconds() -> float:
        prompt = next(prompts)
        begin = time.perf_counter()
        generate(prompt)
        return time.perf_counter() - begin

    first = seconds()
    seconds()
    blended = statistics.median(seconds() for _ in range(REPEAT))
    return [
        {"policy": "full, stored", "engine": "LMCache", "ttft_ms": 1e3 * first},
        {"policy": f"blending {RECOMPUTED:.0%}", "engine": "LMCache", "ttft_ms": 1e3 * blended},
    ]


def main(shape: str, chunks: int, chunk_tokens: int, file: Path) -> None:
    """Measure, and write the rows to the file."""
    os.environ |= SETTINGS
    import torch
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    from kvlinker.quality.bench.harness.shapes import byte_tokenizer, random_transformer

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = random_transformer(shape, dtype=torch.bfloat16, device=device)
    vocabulary = model.config.vocab_size
    tokenizer = byte_tokenizer(vocabulary)
    with tempfile.TemporaryDirectory(prefix="kvlinker-lmcache-") as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        del model
        torch.accelerator.empty_cache()
        llm = LLM(
            folder,
            kv_transfer_config=KVTransferConfig(
                kv_connector="LMCacheConnectorV1", kv_role="kv_both"
            ),
            max_model_len=chunks * (chunk_tokens + len(SEPARATOR)) + 1024,
            enable_prefix_caching=False,
            enforce_eager=True,
        )
        sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        separator = tokenizer.encode(SEPARATOR, add_special_tokens=False)
        warm_up = prompts_of(1, 256, separator, vocabulary)

        def generate(tokens: list[int]) -> None:
            llm.generate({"prompt_token_ids": tokens}, sampling, use_tqdm=False)

        generate(next(warm_up))
        rows = measure(generate, prompts_of(chunks, chunk_tokens, separator, vocabulary))
    file.write_text(json.dumps({"results": rows}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
