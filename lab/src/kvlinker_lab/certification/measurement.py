"""Measures the contents of a certificate: the self-test, answers on data sets, and answers about
the store's own chunks."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import asdict

from kvlinker.base.errors import (
    ContextCacheNotFoundError,
    ContextLengthError,
    InvalidRequestError,
)
from kvlinker.base.types.tenants import DEFAULT_TENANT, Scope
from kvlinker.engines.contract.model_files import read_model
from kvlinker.engines.embedded.selftest import self_test
from kvlinker.linking import parse_policy
from kvlinker.llm import LLM
from kvlinker.quality.bench.harness.benchmark import Setup
from kvlinker.quality.bench.harness.subject import UNMEASURED
from kvlinker.quality.bench.quality import Examined, QualityOptions, main_rows, run_quality
from kvlinker.quality.progress import Progress, silent
from kvlinker.service.audit.certificate import (
    RAW,
    Agreement,
    Certificate,
    conditions_of,
    lossy_codecs,
)
from kvlinker.service.audit.statistics import clopper_pearson
from kvlinker.settings import Settings
from kvlinker.store import ContextCache

OWN_CHUNKS = "own chunks"
"""The name, among tasks, of prompts of the store's own chunks."""

QUESTIONS = (
    "What is this about?",
    "Which facts do these texts state? Answer briefly.",
    "Summarise the texts above in one sentence.",
    "What is the most important name in these texts?",
)
"""The questions after chunks of the store."""

MOST_CHUNKS = 1000
"""The latest context caches of the store that chunks are drawn from."""

CHUNKS_PER_PROMPT = 6
"""The most chunks of a prompt about the store: about as many as retrieval returns. Chosen by
hand."""

ANSWER_TOKENS = 32
"""The tokens of an answer. Agreement is that of its first token, and the audit reports all. Chosen
by hand."""

COMPARED_SECONDS = 600.0
"""The longest wait for the audit of one answer, in seconds. Chosen by hand."""


def certify(
    settings: Settings,
    *,
    target: float = 0.98,
    datasets: Sequence[str] = ("reader",),
    limit: int | None = None,
    prompts: int = 100,
    command: str,
    progress: Progress = silent,
) -> Certificate:
    """Measure the policy of ``settings`` with the model that they name.

    ``target`` is the wanted share of agreeing answers, between 0 and 1. ``datasets`` are names and
    paths, as ``bench quality`` takes them, of each of which at most ``limit`` examples are asked.
    ``prompts`` are those of the store's own chunks; there are fewer where it holds fewer than two.

    Raises ModelLoadError and UnsupportedModelError for a model that cannot be linked, PolicyError,
    and InvalidRequestError for data that cannot be read, for a policy that computes everything, and
    for tiers whose codecs change chunks in several ways.
    """
    parsed = parse_policy(settings.usual_policy)
    if parsed.exact:
        raise InvalidRequestError(
            f"{parsed} computes everything: it needs no certificate. Give another policy.",
            param="policy",
        )
    policy = parsed.name
    codecs = lossy_codecs(settings)
    if len(codecs) > 1:
        raise InvalidRequestError(
            f"A certificate is for chunks of one codec, but tiers have {' and '.join(codecs)}. Give"
            " disk_codec, redis_codec and object_codec the same, or raw.",
            param="disk_codec",
        )
    progress("self-test")
    checks = self_test(read_model(settings)[0])
    subject = Setup(settings, command=command).subject()
    asked = QualityOptions(
        datasets=tuple(datasets),
        policies=("full", policy),
        limit=limit,
        codec=next(iter(codecs), RAW),
    )
    quality = run_quality(subject, settings, asked, progress=progress)
    tasks = agreement_by_task(quality.answered, policy)
    with LLM.from_model(subject.loaded, _audit_settings(settings)) as llm:
        own = audit_own_chunks(llm, prompts, progress=progress)
        fingerprint = llm.engine.fingerprint
    tasks |= {OWN_CHUNKS: own} if own.samples else {}
    together = agreement(
        sum(each.agreeing for each in tasks.values()), sum(each.samples for each in tasks.values())
    )
    return Certificate(
        model=subject.name,
        fingerprint=fingerprint,
        policy=policy,
        conditions=conditions_of(settings),
        target=target,
        passed=all(check.passed for check in checks) and together.ci_low >= target,
        agreement=together,
        issued_at=time.time(),
        command=command,
        machine=quality.report.machine,
        versions=quality.report.versions,
        checks=tuple(asdict(check) | {"passed": check.passed} for check in checks),
        quality=tuple(dict(row) for row in main_rows(quality.report.rows)),
        tasks=tasks,
    )


def agreement_by_task(answered: Sequence[Examined], policy: str) -> dict[str, Agreement]:
    """Count, by data set and task, the questions whose answer's first token agrees under the
    policy, and the scored tokens that do."""
    counts: dict[str, list[bool]] = {}
    for example, results in answered:
        (result,) = (each for each in results if each.policy == policy)
        name = (
            example.task
            if example.task == example.dataset
            else f"{example.dataset}: {example.task}"
        )
        counts.setdefault(name, []).append(result.agreement == 1.0)
    return {name: agreement(sum(agreeing), len(agreeing)) for name, agreeing in counts.items()}


def agreement(agreeing: int, samples: int) -> Agreement:
    """Return the figures of ``agreeing`` answers among ``samples``."""
    low, high = clopper_pearson(agreeing, samples)
    return Agreement(samples, agreeing, agreeing / samples if samples else 0.0, low, high)


def audit_own_chunks(llm: LLM, prompts: int, *, progress: Progress = silent) -> Agreement:
    """Ask ``prompts`` general questions about chunks that the store of ``llm`` holds, in random
    order, and compare all answers.

    ``llm`` audits all of its answers. Each prompt counts once, for the interval is that of
    independent answers: few chunks make few prompts. Those that do not fit the model's window are
    left out, and so are chunks whose context cache expires meanwhile.
    """
    assert llm.policy_manager.auditor is not None
    draw = random.Random(0)
    found = (*_chunks(llm, Scope.PRIVATE), *_chunks(llm, Scope.SHARED))
    caches = list({cache.chunk_key: cache for cache in found}.values())
    asked: set[tuple[ContextCache | str, ...]] = set()
    for number in range(prompts):
        if len(caches) < 2:
            break
        chosen = draw.sample(caches, min(CHUNKS_PER_PROMPT, len(caches)))
        content: tuple[ContextCache | str, ...] = (*chosen, QUESTIONS[number % len(QUESTIONS)])
        if content in asked:
            continue
        asked.add(content)
        progress(OWN_CHUNKS, number, prompts)
        try:
            llm.chat_completion(
                [{"role": "user", "content": content}], max_tokens=ANSWER_TOKENS, temperature=0
            )
        except ContextLengthError:
            continue
        except ContextCacheNotFoundError as gone:
            caches = [cache for cache in caches if cache.id != gone.cache_id]
            continue
        llm.policy_manager.auditor.wait(COMPARED_SECONDS)
    tally = llm.policy_manager.auditor.figures.by_policy(DEFAULT_TENANT).get(
        llm.default_policy().name
    )
    return agreement(0, 0) if tally is None else agreement(tally.agreeing, tally.samples)


def _chunks(llm: LLM, scope: Scope) -> list[ContextCache]:
    """Return the latest context caches of a scope that the model can use."""
    found: list[ContextCache] = []
    after = None
    while len(found) < MOST_CHUNKS:
        page = llm.list_caches(limit=100, after=after, scope=scope)
        found += [cache for cache in page.items if llm.caches.is_usable(cache)]
        if not page.has_more:
            break
        after = page.items[-1]
    return found


def _audit_settings(settings: Settings) -> Settings:
    """Return the settings with every answer audited, and the catalog and tiers of the store."""
    changed = {
        **UNMEASURED,
        "catalog_url": settings.catalog_url,
        "tiers": settings.tiers,
        "audit": 1.0,
        "prefix_cache": "off",
    }
    return settings.model_copy(update=changed)
