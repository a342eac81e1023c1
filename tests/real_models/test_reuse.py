"""With real weights, answers are the same up to rounding where a beginning is reused, after a
restart, and where requests are preempted."""

import math
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from multiprocessing import get_context
from typing import NamedTuple

import pytest

from kvlinker import LLM
from kvlinker.base.types.answers import TokenLogprob
from kvlinker.prompting.segments import FreshSegment, Prompt
from kvlinker.quality.evaluation.datasets.facts import facts
from tests.engines.embedded.conftest import Bench
from tests.real_models.conftest import (
    LIKELIEST,
    MORE_THAN_ROUNDING,
    root_mean_square,
)

CLOSE = 4.0
"""The factor by which the distance of two likely tokens exceeds an error, so that rounding cannot
exchange them: errors of single tokens are up to twice their root mean square."""

LENGTHS = (71, 38)
"""The chunks' lengths in tokens."""

ANSWER = 100
"""The tokens of an answer that outgrows the slots that it is admitted with: those of its prompt,
and 64."""


@pytest.fixture
def allowed(real):
    """The largest error that is rounding, in nats."""
    return MORE_THAN_ROUNDING * real.rounding


def entries_of(outcome):
    assert outcome.failed is None, outcome.failed
    return [entry for delta in outcome.deltas for entry in delta.logprobs]


def require_same(found, expected, allowed):
    """Compare the distributions of two greedy answers, up to where rounding made them go on with
    different tokens."""
    differences: list[float] = []
    for mine, theirs in zip(found, expected, strict=True):
        known = {each.token_id: each.logprob for each in theirs.top}
        likely = [each for each in mine.top if each.token_id in known]
        assert len(likely) > LIKELIEST / 2
        differences += [each.logprob - known[each.token_id] for each in likely]
        if mine.token_id != theirs.token_id:
            assert theirs.logprob - known.get(mine.token_id, -math.inf) <= CLOSE * allowed
            break
    assert root_mean_square(differences) <= allowed


def test_a_beginning_that_is_reused(real, allowed):
    """The whole prompt, and the conversation that goes on with its answer."""
    engine = Bench(model=real.loaded, prefix_cache="on", max_step_tokens=97)
    prompt = real.prompt(*LENGTHS)
    with closing(engine):
        first, again = engine.answer_twice(prompt, "legolink-16", logprobs=LIKELIEST)
        require_same(entries_of(again), entries_of(first), allowed)
        more = FreshSegment((*first.tokens, *real.text[-19:]))
        longer = Prompt((*prompt.segments, more))
        anew = engine.answer(longer, "legolink-16", tenant="another", logprobs=LIKELIEST)
        assert anew.finished.usage.exact_cached_tokens == 0
        reused = engine.answer(longer, "legolink-16", logprobs=LIKELIEST)
        assert reused.finished.usage.exact_cached_tokens >= len(prompt)
        require_same(entries_of(reused), entries_of(anew), allowed)


def test_requests_that_are_preempted(real, allowed):
    """Their prompts fit into the pool together, and their answers do not."""
    prompts = {
        "naive": real.prompt(*LENGTHS),
        "legolink-16": real.prompt(*LENGTHS, header=0),
        "query-15": real.prompt(*reversed(LENGTHS)),
    }

    def answers(slots):
        with closing(Bench(model=real.loaded, kv_slots=slots, max_step_tokens=64)) as engine:
            for prompt in prompts.values():
                engine.cache(prompt)
            with engine.held() as held:
                outcomes = [
                    engine.submit(prompt, policy, logprobs=LIKELIEST, max_tokens=ANSWER)[0]
                    for policy, prompt in prompts.items()
                ]
                held.wait_until_ready(len(outcomes))
            found = [entries_of(outcome.wait()) for outcome in outcomes]
            return found, engine.engine.scheduler.preemptions

    (expected, none), (found, some) = answers(1024), answers(330)
    assert none == 0 < some
    for mine, theirs in zip(found, expected, strict=True):
        require_same(mine, theirs, allowed)


class Reply(NamedTuple):
    entries: tuple[TokenLogprob, ...]
    cached: int
    """The prompt's tokens that were not computed."""


def replies_of(model, state, caches=None):
    """A process's replies to a question behind two context caches, in both orders, and the ids of
    these, which it creates unless there are any."""
    asked = facts(0, 1)
    with LLM(model, state_dir=state, policy="naive", threads=1) as llm:
        assert llm.engine.computes_steps == "compiled"
        if caches is None:
            caches = [made.id for made in llm.generate_context_cache(asked.passages[:2])]
        replies = []
        for order in (caches, caches[::-1]):
            parts = [{"type": "context_cache", "id": each} for each in order]
            answer = llm.completion(
                [*parts, asked.question], max_tokens=12, temperature=0, logprobs=LIKELIEST
            )
            usage = answer.usage
            cached = usage.cached_tokens + usage.exact_cached_tokens
            replies.append(Reply(answer.logprobs, cached))
    return replies, caches


def test_another_process_with_the_same_state(real, allowed, tmp_path):
    """With the GGUF file as it is. KV on disk has keys without their rotation, so that they are
    rounded once more."""
    replies = []
    caches = None
    for _ in range(2):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            found, caches = process.submit(replies_of, real.gguf, tmp_path, caches).result()
        replies.append(found)
    for before, after in zip(*replies, strict=True):
        assert after.cached >= before.cached > 0
        require_same(after.entries, before.entries, allowed)
