"""The verdicts on a server that was soaked: what passes, and what does not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvlinker.base.errors import InvalidRequestError
from kvlinker.engines.contract.contract import engine_closed
from kvlinker_lab.load.driver import (
    BROKEN_OFF,
    CONNECTION,
    ERROR,
    NOT_SENT,
    UNFINISHED,
    PromptUsage,
    RequestResult,
)
from kvlinker_lab.soak import checks
from kvlinker_lab.soak.clients import Tally
from kvlinker_lab.soak.plan import SoakPlan
from kvlinker_lab.soak.readings import Figures

ANSWER = RequestResult(0.1, 0.2, 0.2, output_tokens=3, usage=PromptUsage(10, 6, 1), text="abc")


def figures(**values: float) -> Figures:
    return Figures({(f"kvlinker:{name}", frozenset()): value for name, value in values.items()})


def tally(*results: RequestResult, aborts: bool = False, deleted: bool = False) -> Tally:
    counted = Tally()
    for result in results:
        counted.add(result, aborts=aborts, deleted=deleted)
    return counted


@pytest.mark.parametrize(
    ("values", "passed"),
    [
        ([1, 50, 90, 100, 100, 101, 100, 101, 100], True),  # what fills in the first third
        ([100, 110, 120, 130, 140, 150, 160, 170, 180], False),
        ([100, 100, 100, 100, 500, 100, 100, 500, 100], True),  # peaks
        ([100, 100, 100, 100, 100, 100, 105, 106, 107], False),
        ([200, 200, 200, 100, 100, 100, 50, 50, 50], True),
    ],
)
def test_growth_from_the_middle_third_to_the_last_fails(
    values: Sequence[float], passed: bool
) -> None:
    assert checks.check_growth("memory", values, growth=0.03, slack=2).passed is passed


def test_few_samples_judge_nothing() -> None:
    check = checks.check_growth("memory", [100.0] * 4, growth=0.03, slack=2)
    assert not check.passed
    assert "4 samples" in check.finding
    assert not checks.check_growth("memory", [], growth=0.03, slack=2).passed


def test_small_quantities_may_vary_by_their_slack() -> None:
    assert checks.check_growth("threads", [9, 9, 10, 10, 14, 14], growth=0.03, slack=4).passed
    assert not checks.check_growth("threads", [9, 9, 10, 10, 15, 15], growth=0.03, slack=4).passed


def test_a_run_too_short_to_see_growth_is_refused() -> None:
    with pytest.raises(
        InvalidRequestError, match="300 seconds have fewer than 6 samples, one every 60"
    ):
        SoakPlan(seconds=300, every=60, policies=["full"])


def test_what_failed_on_purpose_is_no_failure() -> None:
    left, lost = (
        RequestResult(None, None, 1.0, failure=failure) for failure in (UNFINISHED, "status 404")
    )
    behind = RequestResult(None, None, 0.0, failure=NOT_SENT)
    assert checks.check_answers(tally(ANSWER, left, behind, aborts=True)).passed
    assert checks.check_answers(tally(lost, behind, deleted=True)).passed
    for counted in (tally(left), tally(lost, aborts=True), tally(left, deleted=True)):
        assert not checks.check_answers(counted).passed
    failed = checks.check_answers(
        tally(ANSWER, RequestResult(None, None, 1.0, failure="error", detail="It broke."))
    )
    assert not failed.passed
    assert failed.finding.startswith("1 beside 1 complete answers, 0 aborted")
    assert failed.finding.endswith("1 × error: It broke.")


@pytest.mark.parametrize("kind", [BROKEN_OFF, CONNECTION])
def test_what_breaks_in_a_restart_is_lost_and_what_is_told_to_be_cut_off_is_not(kind: str) -> None:
    cut = RequestResult(0.1, 0.2, 30.0, failure=ERROR, detail=engine_closed().message)
    told = tally(ANSWER, cut)
    assert (told.cut, told.lost) == (1, 0)
    assert checks.check_answers(told).passed
    assert (
        checks.check_restarts(told, [0, 0], refused=7).finding
        == "0 requests lost and 1 cut off in 2 restarts, beside 7 refusals of requests that were"
        " sent again"
    )
    lost = tally(ANSWER, RequestResult(0.1, 0.2, 1.0, failure=kind, detail="It broke."))
    assert lost.lost == 1
    assert not checks.check_restarts(lost, [0], refused=0).passed
    assert not checks.check_answers(lost).passed
    assert not checks.check_restarts(told, [0, -15], refused=0).passed, "it did not end by itself"


@pytest.mark.parametrize(("ended", "passed"), [(2, False), (3, True), (5, True), (6, False)])
def test_a_server_counts_each_request_once(ended: int, passed: bool) -> None:
    counted = Tally(complete=3, aborted=2)
    check = checks.check_request_counts(
        counted, figures(requests_total=10), figures(requests_total=10 + ended)
    )
    assert check.passed is passed


def test_a_server_counts_the_tokens_that_clients_get() -> None:
    def read(cached: int, output: int) -> Figures:
        return Figures.read(
            "# TYPE kvlinker:prompt_tokens counter\n"
            f'kvlinker:prompt_tokens_total{{source="cached"}} {cached}\n'
            'kvlinker:prompt_tokens_total{source="recomputed"} 2\n'
            'kvlinker:prompt_tokens_total{source="fresh"} 6\n'
            "# TYPE kvlinker:output_tokens counter\n"
            f"kvlinker:output_tokens_total {output}\n"
        )

    calm = tally(ANSWER, ANSWER)
    assert checks.check_token_counts(calm, figures(), read(12, 6)).passed
    for wrong in (read(11, 6), read(12, 7)):
        assert not checks.check_token_counts(calm, figures(), wrong).passed


def test_what_is_held_or_kept_or_not_indexed_is_told() -> None:
    assert checks.check_idle_server(figures()).passed
    assert not checks.check_idle_server(figures(kv_slots_used=1)).passed
    assert checks.check_audit(figures(audit_samples_total=4)).passed
    assert not checks.check_audit(figures(audit_pending=1)).passed
    assert checks.check_deletions(0, figures(), 0).passed
    for caches, chunks, files in ((1, 0, 0), (0, 1, 0), (0, 0, 1)):
        assert not checks.check_deletions(caches, figures(store_chunks=chunks), files).passed
    disk = frozenset({("tier", "disk")})
    indexed = Figures({("kvlinker:store_chunks", disk): 2, ("kvlinker:store_bytes", disk): 30})
    assert checks.check_disk_index(indexed, [10, 20]).passed
    for sizes in ([10], [10, 21], [10, 10, 10]):
        assert not checks.check_disk_index(indexed, sizes).passed


def test_errors_in_the_log_are_told() -> None:
    assert checks.check_log(
        "2026-11-22 INFO GET /health 200\n2026-11-22 WARNING Answers agree less.\n"
    ).passed
    check = checks.check_log("2026-11-22 ERROR It broke.\n")
    assert (check.passed, check.finding) == (False, "1 errors; 2026-11-22 ERROR It broke.")
