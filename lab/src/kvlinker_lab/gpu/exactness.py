"""``python -m kvlinker_lab.gpu.exactness ENGINE FILE``: checks that an engine is exact on this
machine's device, and writes how far it is from its oracle."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from kvlinker.engines.contract.model_files import choose_dtype
from kvlinker.quality.bench.harness.measurement import Workload
from kvlinker.quality.bench.harness.shapes import byte_tokenizer, random_transformer

SHAPE = "tiny"
"""Exactness does not depend on the size."""

POLICIES = ("full", "naive", "legolink-16", "query-10")
TOP = 20
"""The tokens whose log probabilities are compared, the likeliest ones."""

ALLOWED = {torch.float32: 1e-3}
ROUGH = 0.2
"""The largest difference of log probabilities between two engines, in 16 bits."""

Row = dict[str, Any]


def embedded(device: torch.device) -> Iterator[Row]:
    """Yield a row for each check of the embedded engine's self-test, in fp32."""
    from kvlinker.engines.embedded.selftest import self_test

    for check in self_test(random_transformer(SHAPE, dtype=torch.float32, device=device)):
        yield _row(check.name, check.error, check.allowed)


def vllm(device: torch.device) -> Iterator[Row]:
    """Yield, for each policy, how far answers of vLLM are from those of the embedded engine, over
    chunks that the embedded one has computed.

    vLLM's workers start only where their own self-test passes.
    """
    dtype = choose_dtype("auto", device)
    model = random_transformer(SHAPE, dtype=dtype, device=device)
    prompt = Workload(3, 96, 40).prompt(model.config.vocab_size)
    with tempfile.TemporaryDirectory(prefix="kvlinker-exactness-") as folder:
        model.save_pretrained(Path(folder, "model"))
        byte_tokenizer(model.config.vocab_size).save_pretrained(Path(folder, "model"))
        expected, found = (
            _answers(engine, Path(folder), dtype, prompt) for engine in ("embedded", "vllm")
        )
    for policy, ours, theirs in zip(POLICIES, found, expected, strict=True):
        shared = ours.keys() & theirs.keys()
        error = max((abs(ours[token] - theirs[token]) for token in shared), default=float("inf"))
        yield _row(policy, error, ALLOWED.get(dtype, ROUGH))


def _answers(engine: str, folder: Path, dtype: torch.dtype, prompt: Any) -> list[dict[int, float]]:
    """Return the likeliest first tokens under each policy, with their log probabilities."""
    from kvlinker.llm import LLM
    from kvlinker.settings import load_settings

    settings = load_settings(
        engine=engine,
        model=str(folder / "model"),
        dtype=str(dtype).removeprefix("torch."),
        state_dir=folder / "state",
        max_model_len=1024,
        vllm_options={"enforce_eager": True} if engine == "vllm" else {},
    )
    with LLM.from_settings(settings) as llm:
        for chunk in prompt.chunks:
            llm.engine.cache_chunk(chunk, tenant="default").result()
        llm.store.flush()
        answers = [
            llm.chat_completion(
                prompt, policy=policy, temperature=0, max_tokens=1, ignore_eos=True, logprobs=TOP
            )
            for policy in POLICIES
        ]
    return [{each.token_id: each.logprob for each in answer.logprobs[0].top} for answer in answers]


def _row(check: str, error: float, allowed: float) -> Row:
    outcome = "exact" if error <= allowed else "wrong"
    return {"check": check, "error": error, "allowed": allowed, "outcome": outcome}


def main(engine: str, file: Path) -> Sequence[Row]:
    """Write the rows to the file, and return them."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = list({"embedded": embedded, "vllm": vllm}[engine](device))
    file.write_text(json.dumps({"results": rows}))
    return rows


if __name__ == "__main__":
    sys.exit(any(row["outcome"] != "exact" for row in main(sys.argv[1], Path(sys.argv[2]))))
