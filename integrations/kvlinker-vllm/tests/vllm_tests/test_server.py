"""What the embedded engine's server promises, vLLM's keeps: the same tests, and the same client."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from tests.doors.http.serving import Served
from tests.doors.http.test_completions import *  # noqa: F403
from tests.doors.http.test_context_caches import *  # noqa: F403
from tests.doors.http.test_context_caches import PATH, create
from tests.doors.http.test_openai_client import *  # noqa: F403

from kvlinker.base.events import Events
from kvlinker.base.types.messages import ContextCacheReference
from kvlinker.base.types.sampling import SamplingParams
from kvlinker.engines.contract.contract import GenerationRequest
from kvlinker.linking import parse_policy
from kvlinker.service.answer import AnswerBuilder, AnswerStream
from kvlinker.service.audit.auditor import AuditOptions, Auditor
from kvlinker.service.audit.findings import Findings
from kvlinker.settings import Settings


def tier(served: Served, name: str) -> dict[str, Any]:
    return next(tier for tier in served.get("/status").json()["tiers"] if tier["name"] == name)


def test_creation(served: Served) -> None:  # type: ignore[no-redef]
    """Chunks lie on the disk, where vLLM's processes find them, and not in this one's memory."""
    first, second = create(
        served, chunks=["The cat sat on the mat.", "A dog"], name="pets", metadata={"k": "v"}
    )
    assert first["bytes"] > second["bytes"] > 0
    assert first["tier"] == second["tier"] == "disk"
    assert served.get(f"{PATH}/{first['id']}").json() == first
    assert tier(served, "host")["chunks"] == 0


def test_same_content_is_stored_once(served: Served) -> None:  # type: ignore[no-redef]
    before = tier(served, "disk")["chunks"]
    entries = create(served, chunks=["the same words"] * 2)
    assert tier(served, "disk")["chunks"] == before + 1
    for entry in entries:
        served.http.delete(f"{PATH}/{entry['id']}")
    assert tier(served, "disk")["chunks"] == before


def test_the_audit_compares_answers(served: Served) -> None:
    """Under a policy that computes all tokens of the chunks again, they agree."""
    (cache,) = served.cache("a chunk whose tokens are all computed again")
    prompt = served.llm.read_completion((ContextCacheReference(cache), "So?")).prompt
    asked = GenerationRequest(
        prompt, parse_policy("random-100"), SamplingParams(temperature=0, max_tokens=5)
    )
    engine = served.llm.engine
    auditor = Auditor(engine, Events(), AuditOptions(1.0), Findings(Events()))
    try:
        watched = AnswerStream(
            lambda sink: engine.generate(*auditor.watch(asked, sink)), AnswerBuilder()
        )
        answer = watched.answer
        assert auditor.wait(60)
    finally:
        auditor.close()
    found = auditor.figures.by_policy()["random-100"]
    assert answer.logprobs == ()
    assert (found.samples, found.agreeing, found.alike) == (1, 1, 1)
    assert found.answer_kl == pytest.approx(0, abs=1e-4)


def test_tokens_are_scored_whole_as_the_model_does(served: Served, vllm_settings: Settings) -> None:
    """So that the audit has its reference here, too."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(vllm_settings.model, dtype=torch.float32)
    tokens = np.arange(5, 45, dtype=np.int64) * 3 % 256
    found = served.llm.engine.score_whole(tokens, first=31, top=4, tenant="default").result(
        timeout=60
    )
    with torch.inference_mode():
        logits = model(torch.from_numpy(tokens)[None]).logits[0, 30:-1]
    own = torch.log_softmax(logits.float(), -1)
    assert found.token_ids.tolist() == tokens[31:].tolist()
    np.testing.assert_allclose(found.top_logprobs, own.topk(4).values.numpy(), atol=1e-4)
    assert found.top_ids.tolist() == own.topk(4).indices.tolist()
    np.testing.assert_allclose(found.logprobs, own.numpy()[np.arange(9), tokens[31:]], atol=1e-4)
