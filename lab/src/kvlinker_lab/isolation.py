"""Measures whether response times tell a tenant about others' content: lookups of another tenant's
content, beside lookups of none."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import httpx
import typer

from kvlinker.base.errors import ContextCacheNotFoundError
from kvlinker.base.types.tenants import tenant_of_key
from kvlinker.quality.bench.harness.benchmark import Setup, benchmark
from kvlinker.quality.bench.harness.report import Report, Row
from kvlinker.quality.bench.harness.subject import MeasuredModel
from kvlinker.quality.progress import Progress, silent
from kvlinker_lab.serving import serve_llm
from kvlinker_lab.statistics import mann_whitney

if TYPE_CHECKING:
    from kvlinker.llm import LLM

COLUMNS = ("case", "unknown_us", "foreign_us", "difference_us", "p")

OWNER, STRANGER = "owner-key", "stranger-key"
CACHES = "/v1/context_caches"
CHAT = "/v1/chat/completions"
WARM_UP = 10
"""The look-ups before those that count."""


@dataclass(frozen=True, slots=True)
class LookupTimes:
    """Holds the seconds of interleaved lookups."""

    unknown: tuple[float, ...]
    """Lookups of content that no tenant has."""
    foreign: tuple[float, ...]
    """Lookups of another tenant's content."""

    def row(self, case: str) -> Row:
        """Make a row of medians in microseconds; ``p`` says how probable such a difference is if
        there is none."""
        unknown, foreign = (
            1e6 * statistics.median(self.unknown),
            1e6 * statistics.median(self.foreign),
        )
        return {
            "case": case,
            "unknown_us": unknown,
            "foreign_us": foreign,
            "difference_us": foreign - unknown,
            "p": mann_whitney(self.unknown, self.foreign),
        }


@benchmark("isolation")
def isolation(
    setup: Setup,
    *,
    lookups: Annotated[int, typer.Option(min=10, help="Lookups of each kind.")] = 1000,
) -> Report:
    """Measure whether time tells a tenant what other tenants have: lookups of theirs beside lookups
    of nothing."""
    return run_isolation(setup.subject(lookups=lookups), lookups=lookups, progress=setup.progress)


def compare(
    look_up: Callable[[str], object], unknown: Sequence[str], foreign: Sequence[str]
) -> LookupTimes:
    """Time one lookup of each in turn, in a random order within each pair."""
    order = random.Random(0)
    taken: dict[bool, list[float]] = {False: [], True: []}
    for pair in zip(unknown, foreign, strict=True):
        for is_foreign in order.sample((False, True), 2):
            begin = time.perf_counter()
            look_up(pair[is_foreign])
            taken[is_foreign].append(time.perf_counter() - begin)
    return LookupTimes(tuple(taken[False]), tuple(taken[True]))


def run_isolation(subject: MeasuredModel, *, lookups: int, progress: Progress = silent) -> Report:
    """Look up by id in Python and over HTTP, in a prompt, by content, and by what another tenant's
    agents were told: ``lookups`` of each kind and case."""
    from kvlinker.store import new_context_cache_id

    rows = []
    with (
        subject.llm(api_keys=f"{OWNER},{STRANGER}") as llm,
        serve_llm(llm) as url,
        httpx.Client(
            base_url=url, headers={"Authorization": f"Bearer {STRANGER}"}, timeout=60
        ) as http,
    ):
        texts = [f"{index:06d} belongs to the owner" for index in range(lookups)]
        progress(f"{lookups} context caches of another tenant")
        foreign = [
            cache.id for cache in llm.generate_context_cache(texts, tenant=tenant_of_key(OWNER))
        ]
        unknown = [new_context_cache_id() for _ in foreign]
        unknown_texts = [f"{index:06d} belongs to nobody" for index in range(lookups)]
        progress(f"{lookups} answers that are kept for another tenant")
        answers = [f"{index:06d} is what the owner was told" for index in range(lookups)]
        unknown_answers = [f"{index:06d} is what nobody was told" for index in range(lookups)]
        kept = _keep_answers(http, answers)
        for case, look_up, theirs, nobodys in (
            ("id, in Python", _by_id(llm), foreign, unknown),
            (
                "id, over HTTP",
                lambda i: _check_refusal(http.get(f"{CACHES}/{i}")),
                foreign,
                unknown,
            ),
            (
                "id, in a prompt",
                lambda i: _check_refusal(http.post("/v1/completions", json=_prompt(i))),
                foreign,
                unknown,
            ),
            (
                "content",
                lambda text: _check_creation(http.post(CACHES, json={"chunks": [text]})),
                texts,
                unknown_texts,
            ),
            (
                "a kept answer's id, in a prompt",
                lambda i: _check_refusal(http.post("/v1/completions", json=_prompt(i))),
                kept,
                unknown,
            ),
            (
                "a kept answer's text, in a prompt",
                lambda text: _check_answer(http.post(CHAT, json=_handover_body(text))),
                answers,
                unknown_answers,
            ),
        ):
            progress(case)
            if case != "content":  # which finds the caller's own the second time
                compare(look_up, nobodys[:WARM_UP], theirs[:WARM_UP])
            rows.append(compare(look_up, nobodys, theirs).row(case))
    return replace(subject.report(rows), columns=COLUMNS)


def _by_id(llm: LLM) -> Callable[[str], object]:
    def look_up(cache_id: str) -> None:
        with suppress(ContextCacheNotFoundError):
            llm.caches.get(cache_id, tenant=tenant_of_key(STRANGER))

    return look_up


def _keep_answers(http: httpx.Client, answers: Sequence[str]) -> list[str]:
    """Return the ids of context caches that answers to the owner became. The last one is found by
    its text, or nothing would be measured."""
    owner = {"Authorization": f"Bearer {OWNER}"}
    ids = []
    for text in answers:
        body = {
            "messages": [{"role": "user", "content": "What were you told?"}],
            "guided_choice": [text],
            "link": {"keep": "answer"},
        }
        answer = http.post(CHAT, json=body, headers=owner)
        answer.raise_for_status()
        ids.append(answer.json()["link"]["answer"]["id"])
    found = http.post(CHAT, json=_handover_body(answers[-1]), headers=owner).json()
    if [used["id"] for used in found["link"]["context_caches"]] != ids[-1:]:
        raise RuntimeError(f"The owner's answer {answers[-1]!r} is not found by its text: {found}")
    return ids


def _handover_body(text: str) -> dict[str, Any]:
    content = f"Another agent says: {text} Is that so?"
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 1}


def _check_answer(response: httpx.Response) -> None:
    """Check that nothing of another tenant's was linked."""
    response.raise_for_status()
    assert "link" not in response.json(), response.text


def _prompt(cache_id: str) -> dict[str, object]:
    return {"prompt": [{"type": "context_cache", "id": cache_id}], "max_tokens": 1}


def _check_refusal(response: httpx.Response) -> None:
    assert response.status_code == ContextCacheNotFoundError.status, response.text


def _check_creation(response: httpx.Response) -> None:
    response.raise_for_status()
