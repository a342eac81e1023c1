"""Two workers, each with half of the heads, and two engines: the answers and the chunks of one."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from tests.engines.embedded.conftest import linked_prompt

from kvlinker.base.errors import EngineClosedError
from kvlinker.base.types.chunks import Chunk, chunk_key
from kvlinker.llm import LLM
from kvlinker.prompting.segments import Prompt
from vllm_tests.conftest import embedded_settings, vllm_settings_for

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "logprobs": 20}
POLICIES = ["full", "naive", "legolink-16", "random-30", "cacheblend-40-onestep", "query-20"]
TOLERANCE = 1e-4


def damage(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


HARMS: tuple[Callable[[Path], None], ...] = (Path.unlink, damage)


@pytest.mark.whole
def test_two_workers_answer_as_the_embedded_engine(vllm_settings, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    options = vllm_settings.vllm_options | {"tensor_parallel_size": 2, "slice_tokens": 64}
    settings = vllm_settings_for(vllm_settings.model, tmp_path / "state", vllm_options=options)
    embedded = embedded_settings(settings)
    with LLM.from_settings(settings) as two, LLM.from_settings(embedded) as one:
        theirs, ours = (
            linked_prompt(97, 156, 130, header=5, seed=1),
            linked_prompt(70, 200, header=3, seed=2),
        )
        for prompt, llm in ((theirs, one), (ours, two)):
            cache(llm, prompt)
        one.store.flush()
        assert_same_scores(two, one, ours.chunks[0])
        for prompt in (theirs, ours):
            for policy in POLICIES:
                answer, expected = (
                    llm.chat_completion(prompt, policy=policy, **GREEDY) for llm in (two, one)
                )
                assert answer.token_ids == expected.token_ids
                assert answer.usage == expected.usage
                for own, other in zip(answer.logprobs, expected.logprobs, strict=True):
                    assert [t.logprob for t in own.top] == pytest.approx(
                        [t.logprob for t in other.top], abs=TOLERANCE
                    )
        engine: Any = two.engine
        monkeypatch.setattr(
            engine._chunks, "_fetch", lambda key: (True, None)
        )  # nobody computes what is missing
        for seed, (policy, harm) in enumerate(
            product(("naive", "cacheblend-40-onestep"), HARMS), 3
        ):
            prompt = linked_prompt(50, 60, header=3, seed=seed)
            cache(one, prompt)
            one.store.flush()
            harm(settings.state_dir / "chunks" / chunk_file(two, prompt.chunks[1]))
            full = one.chat_completion(prompt, policy="full", **GREEDY)
            answer = two.chat_completion(prompt, policy=policy, **GREEDY)
            assert answer.token_ids == full.token_ids
            assert answer.usage == full.usage
        again = two.chat_completion(ours, policy="naive", **GREEDY)
        assert again.token_ids == one.chat_completion(ours, policy="naive", **GREEDY).token_ids
    with pytest.raises(EngineClosedError, match="shutting down"):
        two.completion("The cat", max_tokens=2)


@pytest.mark.whole
def test_two_engines_behind_one_client_share_chunks(vllm_settings, tmp_path, monkeypatch):
    """Data parallel: each request goes to one of them; several are under way at once."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    options = vllm_settings.vllm_options | {"data_parallel_size": 2}
    settings = vllm_settings_for(vllm_settings.model, tmp_path / "state", vllm_options=options)
    embedded = embedded_settings(settings, chunk_scores=False)
    with (
        LLM.from_settings(settings) as two,
        LLM.from_settings(embedded) as one,
        ThreadPoolExecutor(6) as clients,
    ):
        prompt = linked_prompt(97, 156, 130, header=5, seed=1)
        for each in (two, one):  # computes the chunks
            each.chat_completion(prompt, policy="naive", **GREEDY)
        for policy in POLICIES:
            answers = [
                clients.submit(partial(two.chat_completion, prompt, policy=policy, **GREEDY))
                for _ in range(6)
            ]
            expected = one.chat_completion(prompt, policy=policy, **GREEDY)
            for answer in answers:
                assert answer.result().token_ids == expected.token_ids
                usage = (
                    answer.result().usage
                )  # those that come later find what the first one has computed
                assert usage.cached_tokens >= expected.usage.cached_tokens
                assert usage.prompt_tokens == expected.usage.prompt_tokens


def assert_same_scores(two: LLM, one: LLM, chunk: Chunk) -> None:
    """Check the scores of a chunk that ``two`` has computed against those that ``one`` computes."""
    key = chunk_key(chunk, fingerprint=two.engine.fingerprint, tenant="default")
    found: list[Any] = []
    for llm in (two, one):
        llm.engine.cache_chunk(chunk, tenant="default").result(timeout=120)
        kv = llm.store.get(key)
        assert kv is not None
        found.append(kv.scores)
        for each in (two, one):
            each.store.delete(key)
    np.testing.assert_allclose(found[0].received, found[1].received, atol=1e-4)
    np.testing.assert_allclose(found[0].sensitivity, found[1].sensitivity, rtol=1e-3)
    two.engine.cache_chunk(chunk, tenant="default").result(timeout=120)


def chunk_file(llm: LLM, chunk: Chunk) -> Path:
    key = chunk_key(chunk, fingerprint=llm.engine.fingerprint, tenant="default")
    return Path(key[:2]) / f"{key}.safetensors"


def cache(llm: LLM, prompt: Prompt) -> None:
    for chunk in prompt.chunks:
        llm.engine.cache_chunk(chunk, tenant="default").result(timeout=120)
