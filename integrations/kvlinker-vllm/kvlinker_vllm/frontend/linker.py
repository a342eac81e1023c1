"""Links prompts for vLLM: a request becomes a plan whose chunks are stored where vLLM's workers
find them."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from kvlinker.base.types.answers import Usage
from kvlinker.base.types.chunks import Chunk
from kvlinker.engines.contract.contract import GenerationRequest
from kvlinker.linking.explanation import Explanation, PromptCost
from kvlinker.linking.link import Link
from kvlinker.linking.plan import ChunkUse, LinkPlan, layer_masks
from kvlinker.linking.refinement import Refinement
from kvlinker.prompting.segments import ranges
from kvlinker_vllm.frontend.chunk_provider import ChunkProvider
from kvlinker_vllm.frontend.client import VLLMClient
from kvlinker_vllm.protocol.transfer_plan import (
    COMPARED_LAYER,
    KVDeviation,
    TransferOutcome,
    TransferPlan,
    outcome_of,
    plan_transfer,
    unpack_figures,
)


@dataclass(frozen=True, slots=True)
class FirstPass:
    """The traces of a first pass in vLLM's prefix cache."""

    salt: str
    """The salt of the KV that it placed; no other request has it."""

    linked: int
    """The begin of its last run. The KV before it is found under the salt, except in the last
    block."""


@dataclass(frozen=True, slots=True)
class StoredLink:
    """A link with a plan, whose chunks are stored, and the refinement of a policy that drops tokens
    between layers."""

    link: Link
    """The link, whose plan is for an answer rather than a first pass."""

    layers: int
    """The number of the model's layers."""

    keys: tuple[str, ...]
    """The keys of the chunks of the plan's placements, one each."""

    refinement: Refinement | None = None

    made: frozenset[Chunk] = frozenset()
    """The chunks whose KV was computed for this very request."""

    first_pass: FirstPass | None = None
    """The first pass, whose KV the second one repairs where it lies; None if there was none."""

    @property
    def plan(self) -> LinkPlan:
        """The link's plan."""
        assert self.link.plan is not None
        return self.link.plan

    @property
    def transfer(self) -> TransferPlan:
        """The transfer plan for vLLM: the link's plan, without the tokens that were dropped before
        the compared layer's attention."""
        dropped = () if self.refinement is None else self.refinement.dropped
        *_, computed = layer_masks(self.plan, COMPARED_LAYER + 1, dropped)
        plan = replace(self.plan, runs=ranges(computed))
        if self.first_pass is None:
            return plan_transfer(plan, self.keys)
        return plan_transfer(plan, self.keys, linked=self.first_pass.linked, second_pass=True)

    @property
    def transfer_again(self) -> TransferPlan:
        """The transfer plan once another request has followed ``transfer``: KV in vLLM's prefix
        cache is complete."""
        return self.transfer.model_copy(update={"second_pass": False})

    def salt(self, tenant: str) -> str:
        """Return the salt that keeps the prompt's KV apart in vLLM's prefix cache: the first
        pass's, or a hash of the tenant and the transfer plan."""
        if self.first_pass is not None:
            return self.first_pass.salt
        return hashlib.sha256(f"{tenant}\0{self.transfer.model_dump_json()}".encode()).hexdigest()

    def usage(self, output_tokens: int, *, linked: bool, found: int = 0) -> Usage:
        """Count the prompt's tokens by how they were computed.

        ``linked`` is False if vLLM computed the prompt itself. The first ``found`` tokens, whose KV
        vLLM had, count as cached.
        """
        usage = self.link.usage(
            self.refinement, output_tokens=output_tokens, linked=linked, made=self.made
        )
        if not found:
            return usage
        chunks = self.plan.prompt.cached[:found]
        again = np.ones(found)
        if linked:
            dropped = () if self.refinement is None else self.refinement.dropped
            again = np.mean(layer_masks(self.plan, self.layers, dropped), axis=0)[:found]
        fresh = min(int((~chunks).sum()), usage.fresh_tokens)
        recomputed = min(round(float(again[chunks].sum())), usage.recomputed_tokens)
        return replace(
            usage,
            cached_tokens=usage.cached_tokens + fresh + recomputed,
            recomputed_tokens=usage.recomputed_tokens - recomputed,
            fresh_tokens=usage.fresh_tokens - fresh,
            exact_cached_tokens=min(found, usage.cached_tokens + fresh + recomputed),
        )

    def uses(self) -> tuple[ChunkUse, ...]:
        """Return the share of each placed chunk that is computed again."""
        return self.link.uses(self.layers, self.refinement)

    def explanation(self, cost: PromptCost) -> Explanation:
        """Explain what the policy did to the prompt, and why."""
        return self.link.explanation(self.refinement, layers=self.layers, cost=cost, made=self.made)


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A linked prompt, signed for vLLM's scheduler."""

    linked: StoredLink

    params: Mapping[str, Any]
    """The ``kv_transfer_params`` that carry its transfer plan."""

    salt: str
    """The salt of its KV in vLLM's prefix cache."""

    outcome: TransferOutcome | None = None
    """The outcome of its transfer plan where the plan has been carried out already, so that vLLM's
    handlers find all of its KV; None if it is theirs to carry out."""

    @property
    def tokens(self) -> list[int]:
        """The prompt's token ids."""
        ids: list[int] = self.linked.plan.prompt.tokens.tolist()
        return ids

    def usage(self, params: Mapping[str, Any] | None, output_tokens: int) -> Usage:
        """Count the prompt's tokens by how they were computed. ``params`` are the
        ``kv_transfer_params`` of vLLM's answer, which has the plan's outcome; None if vLLM does not
        report it, and everything counts as planned."""
        outcome = self.outcome or outcome_of(params) or TransferOutcome(linked=True)
        return self.linked.usage(output_tokens, linked=outcome.linked, found=outcome.found)


class VLLMLinker:
    """Drives links, and has vLLM measure for policies that look at the question's attention, or at
    how KV deviates. Its methods are called in the client's loop."""

    def __init__(
        self,
        client: VLLMClient,
        chunks: ChunkProvider,
        *,
        layers: int,
        longest: int,
    ) -> None:
        """``layers`` is the number of the model's layers, ``longest`` the most tokens that may be
        computed for their KV."""
        self._client = client
        self._chunks = chunks
        self._layers = layers
        self._longest = longest

    async def link(self, request: GenerationRequest) -> StoredLink:
        """Plan the request's prompt, and have all of its chunks stored. Raises KVLinkerError."""
        begin = partial(
            Link.begin, request.prompt, request.policy, library=self._chunks.library(request.tenant)
        )
        link = await self._client.in_thread(begin)
        chunks = tuple(dict.fromkeys(link.chunks))
        found = await asyncio.gather(
            *(self._chunks.provide(chunk, request.tenant) for chunk in chunks)
        )
        provided = dict(zip(chunks, found, strict=True))
        scores = [provided[chunk].scores for chunk in link.chunks]
        link = await self._client.in_thread(link.with_scores, scores)
        placed = link.placed([provided[chunk].key for chunk in link.chunks])
        made = frozenset(chunk for chunk, each in provided.items() if each.made)
        return StoredLink(link, self._layers, tuple(key for _, key in placed), made=made)

    async def refine(self, linked: StoredLink, *, explains: bool = False) -> StoredLink:
        """Let a policy select tokens by the question's attention, or drop tokens by the deviation
        of their KV.

        If the attention cannot be measured, everything is computed; if the deviation cannot be, all
        tokens stay. With ``explains``, the figures shown to the policy are kept. Raises
        KVLinkerError.
        """
        if linked.link.probing:
            linked = await self._observe(linked)
        refinement = linked.link.refinement(self._layers, explains=explains)
        if refinement is None:
            return linked
        compares = (
            any(selection.any() for selection in linked.plan.selections)
            and self._layers > COMPARED_LAYER
        )
        deviation = await self._compare(linked) if compares else None
        if deviation is not None:
            positions = np.flatnonzero(layer_masks(linked.plan, COMPARED_LAYER)[0])
            await self._client.in_thread(
                refinement.keep, COMPARED_LAYER, positions, deviation.at(positions)
            )
        if refinement.error is not None:
            raise linked.link.failed(refinement.error) from refinement.error
        return replace(linked, refinement=refinement)

    async def _observe(self, linked: StoredLink) -> StoredLink:
        """Run the first pass in vLLM, and plan the second one by the question's attention in it."""
        probe, link = linked.plan, linked.link
        tokens = probe.prompt.tokens.tolist()
        start = probe.runs[-1][0]
        # so that vLLM never finds the question's own KV again, which the first pass
        # computed over others'
        if start:
            tokens[start - 1] = int(tokens[start - 1] == 0)
        salt = secrets.token_hex(16)
        measured = None
        if probe.length <= self._longest:
            observation = plan_transfer(
                probe, linked.keys, linked=probe.length, measure="attention"
            )
            outcome = await self._client.run_transfer(observation, tokens, salt=salt)
            measured = outcome.measured
        if measured is None:
            return replace(linked, link=await self._client.in_thread(link.in_full), keys=())
        attention = unpack_figures(measured, tokens=probe.length)
        link = await self._client.in_thread(link.with_attention, attention)
        return replace(linked, link=link, first_pass=FirstPass(salt, start))

    async def _compare(self, linked: StoredLink) -> KVDeviation | None:
        """Return the deviation of computed from placed KV up to the end of the last chunk, as vLLM
        measures it; None if a chunk vanished meanwhile."""
        plan = linked.plan
        last_chunk = max(placement.start + placement.last for placement in plan.placements)
        length = min(last_chunk, self._longest)
        comparison = plan_transfer(plan, linked.keys, linked=length, measure="deviation")
        tokens = plan.prompt.tokens[:length].tolist()
        measured = (await self._client.run_transfer(comparison, tokens)).measured
        return None if measured is None else KVDeviation(*unpack_figures(measured, tokens=length))
