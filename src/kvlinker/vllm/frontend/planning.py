"""From a request to a plan whose chunks are all at hand for vLLM's workers, and the order that it becomes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvlinker.embedded.link_loading import asking
from kvlinker.engine.contract import GenerationRequest
from kvlinker.errors import KVLinkerError, PolicyError
from kvlinker.linking import Policy, make_plan
from kvlinker.linking.evidence import NoVariants, PromptEvidence
from kvlinker.linking.plan import LinkPlan, layer_masks, ranges
from kvlinker.linking.refinement import Refinement
from kvlinker.vllm.frontend.chunk_provider import ChunkProvider
from kvlinker.vllm.frontend.client import VLLMClient
from kvlinker.vllm.protocol.messages import KVDeviation
from kvlinker.vllm.protocol.transfer_plan import COMPARED_LAYER, LinkOrder, order_of_comparison, order_of_plan

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PlannedLink:
    """``keys`` name the chunks of the plan's placements. ``refinement``: what the policy dropped, if it refines."""

    plan: LinkPlan
    keys: tuple[str, ...]
    evidence: PromptEvidence
    refinement: Refinement | None = None

    @property
    def dropped(self) -> Sequence[tuple[int, NDArray[np.int64]]]:
        """Tokens that are not computed from some layer on: (first layer without them, positions)."""
        return () if self.refinement is None else tuple(self.refinement.dropped)

    @property
    def recomputed_tokens(self) -> int:
        """Cached tokens that are computed again, mean over the layers."""
        return self.plan.recomputed_tokens if self.refinement is None else self.refinement.recomputed_tokens

    @property
    def order(self) -> LinkOrder:
        *_, computed = layer_masks(self.plan, COMPARED_LAYER + 1, self.dropped)
        return order_of_plan(replace(self.plan, runs=ranges(computed)), self.keys)


class Planner:
    """Its methods are called in the client's loop."""

    def __init__(
        self, client: VLLMClient, chunks: ChunkProvider, executor: Executor, *, layers: int, longest: int
    ) -> None:
        """``executor`` runs what takes a while for long prompts. ``layers``: the model's. ``longest``: tokens that may
        be computed for their KV."""
        self._client = client
        self._chunks = chunks
        self._executor = executor
        self._layers = layers
        self._longest = longest

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

    async def refine(self, link: PlannedLink, *, explains: bool = False) -> PlannedLink:
        """The same, if the policy refines without the tokens that it drops once it has seen how their KV deviates. All
        of them stay where that cannot be told. ``explains``: keep what it is shown. Raises KVLinkerError."""
        plan = link.plan
        if not plan.policy.refines:
            return link
        refinement = Refinement(plan, self._layers, explains=explains)
        compared = any(selection.any() for selection in plan.selections) and self._layers > COMPARED_LAYER
        deviation = await self._compare(link) if compared else None
        if deviation is not None:
            positions = np.flatnonzero(layer_masks(plan, COMPARED_LAYER, ())[0])
            await self._run(lambda: refinement.keep(COMPARED_LAYER, positions, deviation.at(positions)))
        if refinement.error is not None:
            name = plan.policy.name
            logger.error("Policy %s failed.", name, exc_info=refinement.error)
            raise KVLinkerError(f"Policy {name} failed: {refinement.error}") from refinement.error
        return replace(link, refinement=refinement)

    async def _compare(self, link: PlannedLink) -> KVDeviation | None:
        """None where a chunk vanished meanwhile."""
        order = order_of_comparison(link.plan, link.keys, most=self._longest)
        outcome = await self._client.follow(order, link.plan.prompt.tokens[: order.linked].tolist())
        return None if outcome.deviation is None else KVDeviation.of_bytes(outcome.deviation)

    async def _ask(self, policy: Policy, question: Callable[[], T]) -> T:
        return await self._run(partial(_asked, policy, question))

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)


def check_policy(policy: Policy) -> None:
    """Raises PolicyError for one that vLLM cannot follow."""
    late = any(part.refines and part.refined_layer != COMPARED_LAYER for part in policy.parts)
    if late or policy.probes or policy.forecasts:
        raise PolicyError(
            f"The policy {policy.name} decides while the model runs, which the vllm engine does not offer. Use one "
            "that decides before, such as legolink-16 or cacheblend-15-onestep, or the embedded engine.",
            param="link.policy",
        )


def _asked(policy: Policy, question: Callable[[], T]) -> T:
    with asking(policy):
        return question()
