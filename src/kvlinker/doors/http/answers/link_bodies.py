"""The parts of answers that describe how their prompts were linked, and the context caches that
they have become."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from kvlinker.base.types.answers import Usage
from kvlinker.base.types.context_cache import KeptAnswer
from kvlinker.doors.http.answers.choices import Choices
from kvlinker.doors.http.fields.bodies import ResponseBody
from kvlinker.doors.http.fields.explanations import LinkExplanation
from kvlinker.llm import LLM, Explanation, ReadPrompt


class UsedCacheBody(ResponseBody):
    """A context cache in the prompt; ``created`` is true if this request brought its text first."""

    id: str
    tokens: int
    created: bool


class KeptAnswerBody(ResponseBody):
    """The context cache that the answer has become; if ``id`` is null, ``reason`` says why there is
    none."""

    id: str | None
    tokens: int
    reason: str | None = None


class LinkBody(ResponseBody):
    """How the prompt was linked: the policy, and the context caches in it in the order in which
    they stand there. ``explanation`` is there where the request asked for it, and ``answer`` where
    it was to be kept."""

    policy: str
    context_caches: list[UsedCacheBody]
    explanation: LinkExplanation | None = None
    answer: KeptAnswerBody | None = None


def link_body(
    prompts: Collection[ReadPrompt],
    kept: KeptAnswer | None = None,
    explained: LinkExplanation | None = None,
) -> LinkBody | None:
    """Describe how prompts were linked, with the answer's context cache and the explanation if the
    request asked for them; None if there is nothing of this. Each context cache is listed once."""
    linked = [prompt for prompt in prompts if prompt.linked]
    if not (linked or kept or explained):
        return None
    caches: dict[str, UsedCacheBody] = {}
    for cache in (each for prompt in linked for each in prompt.linked):
        body = UsedCacheBody(id=cache.id, tokens=cache.tokens, created=cache.created)
        caches.setdefault(cache.id, body)
    asked: dict[str, Any] = {} if explained is None else {"explanation": explained}
    if kept is not None:
        why = {} if kept.reason is None else {"reason": kept.reason}
        asked["answer"] = KeptAnswerBody(id=kept.id, tokens=kept.tokens, **why)
    policy = next(iter(linked or prompts)).policy.name
    return LinkBody(policy=policy, context_caches=list(caches.values()), **asked)


def ended_link(
    llm: LLM, choices: Choices, explanation: Explanation | None, kept: KeptAnswer | None
) -> LinkBody | None:
    """Return the ``link_body`` of an answer's end. An ``explanation``, which is of the only prompt,
    may take a while."""
    explained = None
    if explanation is not None:
        (read,) = choices.prompts.values()
        explained = LinkExplanation.model_validate(llm.described(explanation, read).to_json())
    return link_body(choices.prompts.values(), kept, explained)


def created_tokens(read: ReadPrompt, usage: Usage) -> int:
    """Return the number of a prompt's tokens that its request cached as chunks of their own, and
    that were not read."""
    created = sum(cache.tokens for cache in read.linked if cache.created)
    return min(created, usage.prompt_tokens - usage.cached_tokens)
