"""The driver of policies for both engines: the decisions so far about one prompt, as an immutable
value."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvlinker.base.errors import KVLinkerError
from kvlinker.base.types.answers import Usage
from kvlinker.base.types.chunk_scores import ChunkScores
from kvlinker.base.types.chunks import Chunk
from kvlinker.linking.evidence import ChunkAttention, EmptyLibrary, Evidence, Forecast, Library
from kvlinker.linking.explanation import (
    Explanation,
    LinkCost,
    PromptCost,
    layer_ranges,
    linked_segments,
)
from kvlinker.linking.plan import ChunkUse, LinkPlan, Placement, chunk_uses, layer_masks
from kvlinker.linking.policies.baselines import Full
from kvlinker.linking.policy import Policy
from kvlinker.linking.refinement import Refinement
from kvlinker.prompting.segments import Prompt, Range, ReusedPrefix, ranges

logger = logging.getLogger(__name__)

T = TypeVar("T")


def no_forecast(prompt: Prompt) -> Forecast:
    """Return the forecast of an engine that has measured nothing."""
    return Forecast(load=None, prefill=None)


def no_reuse(prompt: Prompt, policy: Policy) -> ReusedPrefix | None:
    """Return None: for an engine that reuses only chunks."""
    return None


@dataclass(frozen=True, slots=True)
class Link:
    """One prompt under one policy, with the decisions so far.

    An engine begins a link, fetches the KV of its ``chunks``, passes their scores to it, and
    computes its plan: first the plan of a first pass, if ``probing``, then the one that follows
    from the attention in it. Every step returns a new link. An exception of the policy becomes a
    KVLinkerError that names the policy.
    """

    asked: Policy
    """The request's policy."""

    policy: Policy
    """The policy that decides: the request's, or the one that it settled for."""

    prompt: Prompt = field(repr=False)
    """The prompt as the policy arranged it."""

    forecast: Forecast | None = None
    """The forecast by which the policy settled; None if it does not look at forecasts."""

    evidence: Evidence = field(default=Evidence(), repr=False)
    """The evidence that has been gathered for the policy so far."""

    plan: LinkPlan | None = None
    """The plan to place and compute; None until the chunks' scores are there, where the policy
    needs them."""

    @classmethod
    def begin(
        cls,
        prompt: Prompt,
        policy: Policy,
        *,
        library: Library | None = None,
        forecast: Callable[[Prompt], Forecast] = no_forecast,
        reuse: Callable[[Prompt, Policy], ReusedPrefix | None] = no_reuse,
    ) -> Link:
        """Arrange the prompt, have the policy settle, and plan at once where no scores are needed.

        ``library`` holds the KV that the policy may choose from; ``forecast`` is asked only
        for policies that need it, about the arranged prompt. ``reuse`` is asked for the beginning
        of the arranged prompt that was linked in the same way before.
        """
        wants_library = policy.needs.variants or policy.needs.places
        with _asking(policy):
            arranged = policy.arrange(
                prompt, (library if wants_library else None) or EmptyLibrary()
            )
            if policy.needs.forecast:
                expected = forecast(arranged)
                link = cls(policy, policy.settle(expected), arranged, expected)
            else:
                link = cls(policy, policy, arranged)
        reused = reuse(link.prompt, link.policy)
        if reused is not None:
            link = replace(link, prompt=replace(link.prompt, reused=reused))
        return link if link.policy.needs.reads_scores else link._with_evidence(Evidence())

    @property
    def probing(self) -> bool:
        """True if the plan is that of a first pass, which measures the question's attention."""
        return self._takes_first_pass and self.evidence.attention is None

    @property
    def is_inexact(self) -> bool:
        """True if the plan, or what it reuses, has KV of chunks that is not exact in its place."""
        plan, reused = self._known_plan, self.prompt.reused
        if reused is not None and any(reused.linked.values()):
            return True
        kept = (
            self.prompt.inexact
            if self.policy.needs.refines
            else (self.prompt.inexact & ~plan.computed)
        )
        return bool(kept.any())

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """The chunks whose KV is to be fetched, in order: the prompt's where their scores are
        needed, else those that the plan places. A chunk that stands twice is listed twice."""
        if self.plan is None or self.policy.needs.reads_scores:
            return tuple(map(self.prompt.chunks.__getitem__, self._scored))
        return tuple([placement.chunk for placement in self.plan.placements])

    @property
    def computed(self) -> tuple[Range, ...]:
        """The positions that are computed for certain: the plan's, or without one the fresh
        tokens."""
        return ranges(~self.prompt.cached) if self.plan is None else self.plan.runs

    def with_scores(self, scores: Sequence[ChunkScores | None]) -> Link:
        """Plan by the scores of all ``chunks``, None for those that were stored without; nothing
        changes where there is a plan already."""
        if self.plan is not None:
            return self
        of_all: list[ChunkScores | None] = [None] * len(self.prompt.chunks)
        for index, each in zip(self._scored, scores, strict=True):
            of_all[index] = each
        return self._with_evidence(Evidence(tuple(of_all)))

    def with_attention(self, attention: NDArray[np.float32]) -> Link:
        """Plan the second pass by the question's ``attention`` [layers, length] in the first
        one."""
        return self._with_evidence(replace(self.evidence, attention=attention))

    def in_full(self) -> Link:
        """Plan to compute every token: an engine does so if it cannot measure the figures that the
        policy needs."""
        full = Full()
        return replace(self, policy=full, plan=make_plan(self.prompt, full, self.evidence))

    def placed(self, fetched: Sequence[T]) -> tuple[tuple[Placement, T], ...]:
        """Pair the plan's placements with their entries of ``fetched``, which holds one for each of
        ``chunks``."""
        plan = self._known_plan
        if not self.policy.needs.reads_scores:
            return tuple(zip(plan.placements, fetched, strict=True))
        spans = [self.prompt.spans[index] for index in self._scored]
        at = {span.start: entry for span, entry in zip(spans, fetched, strict=True)}
        return tuple((placement, at[placement.start]) for placement in plan.placements)

    def refinement(
        self, layers: int, *, watch: ChunkAttention | None = None, explains: bool = False
    ) -> Refinement | None:
        """Return the refinement through the model's ``layers``; None for policies that drop
        nothing, and in a first pass.

        ``watch`` is required where the policy needs ``chunk_attention``. With ``explains``, the
        figures that the policy is shown are kept.
        """
        if self.probing or not self.policy.needs.refines:
            return None
        return Refinement(self._known_plan, layers, watch=watch, explains=explains)

    def usage(
        self,
        refinement: Refinement | None = None,
        *,
        output_tokens: int = 0,
        linked: bool = True,
        made: Collection[Chunk] = (),
    ) -> Usage:
        """Count the prompt's tokens by how they are computed, averaged over the layers; all are
        zero while there is no plan.

        ``linked`` is False if the engine computed the whole prompt in the end. ``made`` are the
        chunks whose KV was computed for this very request: their kept tokens count as fresh, where
        they stand first. Tokens that an earlier request computed do not.
        """
        plan = self.plan
        if plan is None:
            return Usage(0, 0, 0, output_tokens)
        held = plan.cached_tokens + plan.recomputed_tokens
        if not linked:
            return Usage(0, held, plan.fresh_tokens, output_tokens)
        recomputed = (refinement or plan).recomputed_tokens
        reused = self.prompt.reused_tokens
        kept = self._kept(made, refinement)
        exact = reused - round(float(kept[:reused].sum()))
        new = min(round(float(kept.sum())), held - recomputed - exact)
        cached = held - recomputed - new
        return Usage(cached, recomputed, plan.fresh_tokens + new, output_tokens, exact)

    def uses(self, layers: int, refinement: Refinement | None = None) -> tuple[ChunkUse, ...]:
        """Return the share of each placed chunk that was computed again, averaged over the model's
        ``layers``."""
        return chunk_uses(
            self._known_plan, layers, () if refinement is None else refinement.dropped
        )

    def explanation(
        self,
        refinement: Refinement | None = None,
        *,
        layers: int,
        cost: PromptCost,
        made: Collection[Chunk] = (),
        missed: NDArray[np.int64] | None = None,
        attention: NDArray[np.float32] | None = None,
    ) -> Explanation:
        """Explain what the policy did to the prompt, and why, in a model of ``layers`` layers.

        ``made`` are the chunks whose KV was computed for this very request, ``missed`` the
        positions of reused tokens that were gone when their turn came: both are fresh.
        ``attention`` [layers, length] is the last token's.
        """
        gone = np.empty(0, dtype=np.int64) if missed is None else missed
        fresh = ~self.prompt.cached
        for chunk, start in self._places(made).items():
            fresh[start : start + len(chunk)] = True
        fresh[self.prompt.reused_own] = False
        fresh[gone] = True
        usage = self.usage(refinement, made=made).without(len(gone))
        with _asking(self.asked):
            explained = (
                () if self._nothing_to_choose else self.policy.explain(self.prompt, self.evidence)
            )
        masks = layer_masks(
            self._known_plan, layers, () if refinement is None else refinement.dropped
        )
        flops = cost.flops(masks)
        if self._takes_first_pass:
            flops += cost.flops(layer_masks(probe_plan(self.prompt, self.policy), layers))
        return Explanation(
            policy=self.asked.name,
            settled=self.policy.name,
            forecast=self.forecast,
            token_ids=tuple(self.prompt.tokens.tolist()),
            reused_tokens=self.prompt.reused_tokens,
            fresh=ranges(fresh),
            segments=linked_segments(self.prompt),
            layers=layer_ranges(self.prompt, masks),
            scores=explained if refinement is None else (*explained, *refinement.shown),
            cost=LinkCost(
                usage.cached_tokens,
                usage.recomputed_tokens,
                usage.fresh_tokens,
                flops=flops,
                full_flops=cost.flops([np.ones(len(self.prompt), dtype=np.bool_)] * layers),
            ),
            attention=attention,
        )

    def failed(self, error: Exception) -> KVLinkerError:
        """Return the error for a request whose policy raised ``error``, which is logged."""
        return policy_failed(self.asked, error)

    def _kept(
        self, chunks: Collection[Chunk], refinement: Refinement | None
    ) -> NDArray[np.float64]:
        """Return the share of the layers in which each token has the KV of these chunks: [length].
        It is 0 where this request or an earlier one computed the token, and in all places of a
        chunk but its first."""
        kept = np.zeros(len(self.prompt))
        if places := self._places(chunks):
            dropped, layers = (
                ((), 1) if refinement is None else (refinement.dropped, refinement.layers)
            )
            computed = np.mean(layer_masks(self._known_plan, layers, dropped), axis=0)
            for chunk, start in places.items():
                kept[start : start + len(chunk)] = 1 - computed[start : start + len(chunk)]
        kept[self.prompt.reused_own] = 0
        return kept

    def _places(self, chunks: Collection[Chunk]) -> dict[Chunk, int]:
        """Return the positions where these chunks begin that are placed; of one that stands several
        times, the first one."""
        return {
            p.chunk: p.start for p in reversed(self._known_plan.placements) if p.chunk in chunks
        }

    @property
    def _scored(self) -> tuple[int, ...]:
        """The indices of the prompt's chunks whose scores the policy is shown: where it can do
        without, not of those that an earlier request computed as a whole in this sequence, whose
        KV would be loaded for nothing."""
        spans = self.prompt.spans
        if self.policy.needs.scores or self.prompt.reused is None:
            return tuple(range(len(spans)))
        own = np.zeros(len(self.prompt), dtype=np.bool_)
        own[self.prompt.reused_own] = True
        return tuple(
            index for index, span in enumerate(spans) if not own[span.start : span.end].all()
        )

    @property
    def _known_plan(self) -> LinkPlan:
        assert self.plan is not None, "the chunks' scores are needed first"
        return self.plan

    @property
    def _takes_first_pass(self) -> bool:
        """True if a first pass measures the question's attention: the policy needs it, and has
        tokens to choose from."""
        return self.policy.needs.question_attention and bool(self.prompt.inexact.any())

    @property
    def _nothing_to_choose(self) -> bool:
        """True if the policy would look at the question's attention, but every chunk is exact or
        reused."""
        return self.policy.needs.question_attention and not self._takes_first_pass

    def _with_evidence(self, evidence: Evidence) -> Link:
        link = replace(self, evidence=evidence)
        with _asking(self.asked):
            if link.probing or link._nothing_to_choose:
                return replace(link, plan=probe_plan(self.prompt, self.policy))
            return replace(link, plan=make_plan(self.prompt, self.policy, evidence))


def make_plan(prompt: Prompt, policy: Policy, evidence: Evidence) -> LinkPlan:
    """Turn a policy's selection into a plan. Raises ValueError for one that is no mask of the
    prompt's positions."""
    return _plan_of_selections(
        prompt, policy, tuple(_selection(prompt, part, evidence) for part in policy.parts)
    )


def _selection(prompt: Prompt, policy: Policy, evidence: Evidence) -> NDArray[np.bool_]:
    mask = np.asarray(policy.select(prompt, evidence), dtype=np.bool_)
    if mask.shape != (len(prompt),):
        raise ValueError(f"select returned shape {mask.shape} for {len(prompt)} tokens")
    return mask & prompt.cached & prompt.changeable


def probe_plan(prompt: Prompt, policy: Policy) -> LinkPlan:
    """Plan the first pass of a policy that needs the question's attention: only fresh tokens are
    computed."""
    return _plan_of_selections(
        prompt, policy, (np.zeros(len(prompt), dtype=np.bool_),) * len(policy.parts)
    )


def _plan_of_selections(
    prompt: Prompt, policy: Policy, selections: tuple[NDArray[np.bool_], ...]
) -> LinkPlan:
    """Plan to compute the selected tokens, and always fresh tokens and the prompt's last token,
    whose logits are needed.

    The KV of a chunk's leading and trailing computed tokens is left out, unless the policy needs to
    see or keep that of all tokens.
    """
    computed = np.logical_or.reduce([~prompt.cached, *selections])
    computed[-1:] = True
    own = computed.copy()
    own[prompt.reused_own] = True
    placements = []
    for chunk, span in zip(prompt.chunks, prompt.spans, strict=True):
        kept = np.flatnonzero(~own[span.start : span.end])
        if span.end > prompt.reused_tokens and (
            policy.needs.refines or policy.needs.question_attention
        ):
            first, last = 0, span.length
        elif kept.size:
            first, last = int(kept[0]), int(kept[-1]) + 1
        else:
            continue
        rotary_start = span.start if policy.positioned else len(chunk.prefix)
        placements.append(Placement(chunk, span.start, first, last, rotary_start))
    fresh_tokens = int((~prompt.cached).sum())
    recomputed_tokens = int(computed.sum()) - fresh_tokens
    return LinkPlan(
        policy=policy,
        prompt=prompt,
        placements=tuple(placements),
        runs=ranges(computed),
        cached_tokens=len(prompt) - fresh_tokens - recomputed_tokens,
        recomputed_tokens=recomputed_tokens,
        fresh_tokens=fresh_tokens,
        selections=selections,
    )


def policy_failed(policy: Policy, error: Exception) -> KVLinkerError:
    """Return the error for a request whose policy raised ``error``, which is logged; a
    KVLinkerError is returned unchanged."""
    if isinstance(error, KVLinkerError):
        return error
    logger.error("Policy %s failed.", policy.name, exc_info=error)
    return KVLinkerError(f"Policy {policy.name} failed: {error}")


@contextmanager
def _asking(policy: Policy) -> Iterator[None]:
    """Turn the policy's exceptions into a KVLinkerError that names it."""
    try:
        yield
    except Exception as error:
        raise policy_failed(policy, error) from error
