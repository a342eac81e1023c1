"""The parts of answers that describe how their prompts were linked, and the context caches that
they have become."""

from __future__ import annotations

from collections.abc import Iterable

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


def link_body(prompts: Iterable[ReadPrompt]) -> LinkBody | None:
    """Describe how prompts were linked; None if they had no chunks. Each context cache is listed
    once."""
    linked = [prompt for prompt in prompts if prompt.linked]
    caches: dict[str, UsedCacheBody] = {}
    for cache in (each for prompt in linked for each in prompt.linked):
        body = UsedCacheBody(id=cache.id, tokens=cache.tokens, created=cache.created)
        caches.setdefault(cache.id, body)
    return (
        LinkBody(policy=linked[0].policy.name, context_caches=list(caches.values()))
        if linked
        else None
    )


def with_kept(
    link: LinkBody | None, prompts: Iterable[ReadPrompt], kept: KeptAnswer | None
) -> LinkBody | None:
    """Return how prompts were linked, None if they had no chunks, with the context cache of an
    answer that was to be kept."""
    if kept is None:
        return link
    if link is None:
        policy = next(iter(prompts)).policy.name
        link = LinkBody(policy=policy, context_caches=[])
    why = {} if kept.reason is None else {"reason": kept.reason}
    answer = KeptAnswerBody(id=kept.id, tokens=kept.tokens, **why)
    return link.model_copy(update={"answer": answer})


def explained_body(llm: LLM, choices: Choices, explanation: Explanation | None) -> LinkBody | None:
    """Describe and explain how the only prompt was linked; None if there is no explanation. It may
    take a while."""
    if explanation is None:
        return None
    (read,) = choices.prompts.values()
    explained = LinkExplanation.model_validate(llm.described(explanation, read).to_json())
    caches = link_body([read])
    return LinkBody(
        policy=read.policy.name,
        context_caches=[] if caches is None else caches.context_caches,
        explanation=explained,
    )


def ended_link(
    llm: LLM, choices: Choices, explanation: Explanation | None, kept: KeptAnswer | None
) -> LinkBody | None:
    """Describe how prompts were linked, with the explanation and the answer's context cache if the
    request asked for them; None if there is nothing of this. It may take a while."""
    prompts = choices.prompts.values()
    return with_kept(explained_body(llm, choices, explanation) or link_body(prompts), prompts, kept)


def created_tokens(read: ReadPrompt, usage: Usage) -> int:
    """Return the number of a prompt's tokens that its request cached as chunks of their own, and
    that were not read."""
    created = sum(cache.tokens for cache in read.linked if cache.created)
    return min(created, usage.prompt_tokens - usage.cached_tokens)
