"""Measures the policies that ``policy = "auto"`` chooses from, with the engine that serves, while
it has nothing else to do."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from queue import SimpleQueue
from statistics import fmean

from kvlinker.base.errors import EngineClosedError, KVLinkerError
from kvlinker.base.types.answers import Delta, TokenLogprob
from kvlinker.base.types.chunks import Chunk, chunk_key, with_places
from kvlinker.base.types.messages import ChatMessage
from kvlinker.base.types.sampling import SamplingParams
from kvlinker.engines.contract.contract import Failed, Finished, GenerationEvent, GenerationRequest
from kvlinker.linking import Policy, parse_policy
from kvlinker.llm import LLM
from kvlinker.prompting.segments import FreshSegment, Prompt
from kvlinker.quality.evaluation.contexts import ContextSplitter
from kvlinker.quality.evaluation.datasets import load_dataset
from kvlinker.quality.evaluation.datasets.facts import EXAMPLES, LENGTHS, facts
from kvlinker.quality.evaluation.examples import Question
from kvlinker.service.audit.comparison import NextToken, agree, kl_divergence
from kvlinker.service.audit.measured import PolicyFigures

logger = logging.getLogger(__name__)

QUESTIONS = 8
"""The most questions of each kind: about facts that several documents have alike, and of the data
set ``reader``."""

LEAST_QUESTIONS = 2
"""The fewest questions of each kind, also on a slow machine."""

SECONDS = 600.0
"""The seconds for which there may be more than the least."""

TOKENS_PER_QUESTION = 45_000
"""About the tokens that are computed for a question of each kind, most of them in rows."""

ANSWER_TOKENS = 24
"""The most tokens of an answer that are compared. Chosen by hand."""

TOP = 100
"""The most likely tokens of each distribution that are compared; all others count as one."""

TENANT = "kvlinker's own measurements"
FULL = parse_policy("full")

IDLE_SECONDS = 30.0
"""The time for which a server has nothing to do before it measures."""

POLL_SECONDS = 0.5
"""The time between two looks whether the engine has something else to do."""


@contextmanager
def measure_in_background(llm: LLM) -> Iterator[None]:
    """Measure the policies of ``auto`` in a thread, by the embedded engine, unless they were
    measured before. At the end of the context, the current request is the last one."""
    auto = llm.policy_manager.auto
    if llm.settings.engine != "embedded" or auto is None or auto.figures:
        yield
        return
    closing = threading.Event()

    def measure() -> None:
        try:
            _wait_for_idle(llm, closing, IDLE_SECONDS)
            wait = partial(_wait_for_idle, llm, closing)
            questions = affordable_questions(llm)
            auto.keep(measure_policies(llm, auto.candidates, questions=questions, wait=wait))
        except EngineClosedError:
            pass
        except KVLinkerError as error:  # such as that of a model without a chat template
            logger.warning("The policies of auto could not be measured: %s", error.message)
        except Exception:
            logger.exception("The policies of auto could not be measured.")

    thread = threading.Thread(target=measure, name="kvlinker-measuring", daemon=True)
    thread.start()
    try:
        yield
    finally:
        closing.set()


def affordable_questions(llm: LLM) -> int:
    """Return the number of questions of each kind that the engine can answer in time."""
    seconds = llm.engine.prefill_seconds(1000)
    affordable = SECONDS * 1000 / (TOKENS_PER_QUESTION * seconds) if seconds else QUESTIONS
    return max(LEAST_QUESTIONS, min(QUESTIONS, int(affordable)))


def _wait_for_idle(llm: LLM, closing: threading.Event, seconds: float = 0.0) -> None:
    """Wait until the engine has been idle for ``seconds``. Raises EngineClosedError once
    ``closing`` is set."""
    idle_since: float | None = None
    while not closing.is_set():
        load, now = llm.engine.current_load(), time.monotonic()
        if load.running + load.waiting:
            idle_since = None
        else:
            idle_since = now if idle_since is None else idle_since
            if now - idle_since >= seconds:
                return
        closing.wait(POLL_SECONDS)
    raise EngineClosedError("The server stops.")


def measure_policies(
    llm: LLM,
    policies: Sequence[Policy],
    *,
    questions: int,
    wait: Callable[[], None] = lambda: None,
) -> list[PolicyFigures]:
    """Measure how far answers under the ``policies`` are from those of the full computation, each
    token behind the tokens that the full computation gave.

    ``questions`` of each kind are asked, and the kind on which a policy is further away counts.
    ``wait`` is called before each request, and may raise. Computed chunks are removed from the
    store in the end; after an interruption, the next call goes on from them. Raises the error of a
    failed request.
    """
    kinds = {
        "facts": [facts(EXAMPLES + 1 + number, LENGTHS[-1]) for number in range(questions)],
        "reader": _reader_questions(llm, questions),
    }
    asked = [(kind, each) for kind, several in kinds.items() for each in several]
    chunks = {
        question: [llm.builder.encode_chunk(passage) for passage in question.passages]
        for _, question in asked
    }
    for several in kinds.values():
        _cache(llm, [chunks[question] for question in several], policies, wait)
    found: dict[tuple[Policy, str], list[_Compared]] = defaultdict(list)
    for kind, question in asked:
        content: tuple[Chunk | str, ...] = (*chunks[question], question.question)
        prompt = llm.builder.chat([ChatMessage("user", content)])
        wait()
        answer = _answer(llm, prompt)
        for policy in policies:
            wait()
            found[policy, kind].append(_compare(llm, prompt, answer, policy))
    keys = with_places(
        chunk_key(chunk, fingerprint=llm.engine.fingerprint, tenant=TENANT)
        for several in chunks.values()
        for chunk in several
    )
    for key in keys:
        llm.store.delete(key)
    return [_figures(policy.name, [found[policy, kind] for kind in kinds]) for policy in policies]


def _reader_questions(llm: LLM, count: int) -> list[Question]:
    dataset = load_dataset("reader", ContextSplitter(llm.builder.encoder), limit=count)
    return [example for example in dataset.examples if isinstance(example, Question)]


def _cache(
    llm: LLM,
    chunks: Sequence[Sequence[Chunk]],
    policies: Sequence[Policy],
    wait: Callable[[], None],
) -> None:
    """Compute the chunks of all questions, and compute them in rows that mix questions, like a
    collection of which a prompt takes a few."""
    mixed = [chunk for column in zip_longest(*chunks) for chunk in column if chunk is not None]
    for chunk in mixed:
        wait()
        llm.engine.cache_chunk(chunk, tenant=TENANT, idle=True).result()
    if any(policy.needs.places for policy in policies):
        llm.engine.expect_together(mixed, tenant=TENANT)
        llm.engine.settle().result()


@dataclass(frozen=True, slots=True)
class _Compared:
    """An answer under a policy, compared with the full computation's."""

    kl: float
    """The mean over its tokens."""
    agreement: float
    recomputed: float
    """The share of the chunks' tokens that were computed again."""
    tokens: int


def _answer(llm: LLM, prompt: Prompt) -> list[TokenLogprob]:
    """Return the tokens of the full computation's answer."""
    sampling = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, logprobs=TOP)
    events: SimpleQueue[GenerationEvent] = SimpleQueue()
    request = GenerationRequest(prompt, FULL, sampling, TENANT, salt=FULL.name)
    llm.engine.generate(request, lambda _, event: events.put(event))
    tokens: list[TokenLogprob] = []
    while not isinstance(event := events.get(), Finished):
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Delta):
            tokens += event.logprobs
    if event.reason == "cancelled":
        raise KVLinkerError("The request was cancelled.")
    return tokens


def _compare(llm: LLM, prompt: Prompt, answer: Sequence[TokenLogprob], policy: Policy) -> _Compared:
    """Compare the distributions along the answer under a policy. Each policy has a salt of its own,
    so that none reuses what another has computed."""
    tokens = FreshSegment(tuple(entry.token_id for entry in answer))
    request = GenerationRequest(
        Prompt((*prompt.segments, tokens)),
        policy,
        SamplingParams(logprobs=TOP),
        TENANT,
        salt=policy.name,
    )
    scored = llm.engine.score(request).result()
    rows = zip(scored.top_ids[-len(answer) :], scored.top_logprobs[-len(answer) :], strict=True)
    full = [NextToken.of(entry.top) for entry in answer]
    mine = [NextToken(ids, logprobs.astype(float)) for ids, logprobs in rows]
    pairs = list(zip(full, mine, strict=True))
    return _Compared(
        fmean(kl_divergence(*pair) for pair in pairs),
        fmean(agree(*pair) for pair in pairs),
        scored.usage.recomputed_tokens / sum(map(len, prompt.chunks)),
        len(pairs),
    )


def _figures(policy: str, kinds: Sequence[Sequence[_Compared]]) -> PolicyFigures:
    """Return the figures of a policy: those of the kind of questions on which it is the furthest
    away."""
    furthest = max(kinds, key=lambda several: fmean(each.kl for each in several))
    return PolicyFigures(
        policy,
        answer_kl=fmean(each.kl for each in furthest),
        agreement=fmean(each.agreement for each in furthest),
        recomputed=fmean(each.recomputed for each in furthest),
        prompts=len(furthest),
        tokens=sum(each.tokens for each in furthest),
    )
