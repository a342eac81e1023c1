"""From a request to a plan whose chunks are all at hand for vLLM's workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from kvlinker.engine.base import GenerationRequest
from kvlinker.engine.link_loading import PromptEvidence, asking
from kvlinker.errors import PolicyError
from kvlinker.linking import Policy, make_plan
from kvlinker.linking.library import NoVariants
from kvlinker.linking.plan import LinkPlan
from kvlinker.vllm.chunk_provider import ChunkProvider

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PlannedLink:
    """``keys`` name the chunks of the plan's placements."""

    plan: LinkPlan
    keys: tuple[str, ...]
    evidence: PromptEvidence


class Planner:
    """Its method is called in the client's loop."""

    def __init__(self, chunks: ChunkProvider, executor: Executor) -> None:
        """``executor`` runs what takes a while for long prompts."""
        self._chunks = chunks
        self._executor = executor

    async def link(self, request: GenerationRequest) -> PlannedLink:
        """Arrange, have all chunks provided, and plan. Raises KVLinkerError."""
        policy, tenant = request.policy, request.tenant
        prompt = await self._ask(policy, lambda: policy.arrange(request.prompt, NoVariants()))
        evidence = PromptEvidence()
        if policy.uses_scores:
            provided = (self._chunks.provide(chunk, tenant) for chunk in prompt.chunks)
            evidence = PromptEvidence(tuple(await asyncio.gather(*provided)))
        plan = await self._ask(policy, lambda: make_plan(prompt, policy, evidence))
        chunks = [placement.chunk for placement in plan.placements]
        if not policy.uses_scores:
            await asyncio.gather(*(self._chunks.provide(chunk, tenant) for chunk in dict.fromkeys(chunks)))
        return PlannedLink(plan, tuple(self._chunks.key(chunk, tenant) for chunk in chunks), evidence)

    async def _ask(self, policy: Policy, question: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, partial(_asked, policy, question))


def check_policy(policy: Policy) -> None:
    """Raises PolicyError for one that vLLM cannot follow."""
    if policy.refines or policy.probes or policy.forecasts:
        raise PolicyError(
            f"The policy {policy.name} decides while the model runs, which the vllm engine does not offer. Use one "
            "that decides before, such as legolink-16, or the embedded engine.",
            param="link.policy",
        )


def _asked(policy: Policy, question: Callable[[], T]) -> T:
    with asking(policy):
        return question()
