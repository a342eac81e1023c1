"""Checks the readings of a soaked server: nothing grows, nothing fails, and all figures agree."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from kvlinker.quality.bench.harness.report import ReportCheck
from kvlinker_lab.soak.clients import Tally
from kvlinker_lab.soak.plan import FEWEST_SAMPLES
from kvlinker_lab.soak.readings import Figures

_MOST_FAILURES = 3
"""Kinds of failures that are named."""


def check_growth(name: str, values: Sequence[float], *, growth: float, slack: float) -> ReportCheck:
    """Check that a quantity does not grow.

    The first third of the values, in which caches fill, does not count: the median of the last
    third may exceed that of the middle third by the share ``growth``, or by ``slack`` where that is
    more.
    """
    if len(values) + 1 < FEWEST_SAMPLES:  # the last may have come too late
        return ReportCheck(name, False, f"{len(values)} samples are too few to see growth")
    third = len(values) // 3
    middle, last = median(values[third : 2 * third]), median(values[2 * third :])
    allowed = max(growth * middle, slack)
    return ReportCheck(
        name,
        last - middle <= allowed,
        f"{middle:.1f} in the middle third, {last:.1f} in the last, which may be {allowed:.1f}"
        " more",
    )


def check_answers(tally: Tally) -> ReportCheck:
    """Check that every request was answered. Requests that were aborted on purpose, or asked for
    deleted content, do not count."""
    kinds = "".join(
        f"; {count} × {what}" for what, count in tally.failures.most_common(_MOST_FAILURES)
    )
    return ReportCheck(
        "failed requests",
        not tally.failures,
        f"{tally.failures.total()} beside {tally.complete} complete answers, {tally.aborted}"
        f" aborted on purpose and {tally.not_found} that asked for what was deleted{kinds}",
    )


def check_restarts(tally: Tally, statuses: Sequence[int], refused: int) -> ReportCheck:
    """Check that no request was lost which a server had accepted and had time to finish, in
    restarts that ended with these exit ``statuses``; ``refused`` requests were sent again."""
    wrong = sorted({status for status in statuses if status})
    return ReportCheck(
        "restarts",
        not (tally.lost or wrong),
        f"{tally.lost} requests lost and {tally.cut} cut off in {len(statuses)} restarts, beside"
        f" {refused} refusals of requests that were sent again"
        + (f"; exit status {wrong}" if wrong else ""),
    )


def check_request_counts(tally: Tally, since: Figures, now: Figures) -> ReportCheck:
    """Check that the server counted each request once; one that was aborted may have ended before
    it noticed, or not have begun."""
    ended, failed = (
        now.total("requests_total", **labels) - since.total("requests_total", **labels)
        for labels in ({}, {"reason": "failed"})
    )
    return ReportCheck(
        "requests counted",
        tally.complete <= ended <= tally.complete + tally.aborted and not failed,
        f"{ended} by the server, {failed} of them failed; by clients {tally.complete} complete and"
        f" {tally.aborted} aborted",
    )


def check_token_counts(calm: Tally, before: Figures, after: Figures) -> ReportCheck:
    """Check that server and clients count the same tokens, where no request was aborted."""
    counted = {
        source: (
            after.total("prompt_tokens_total", source=source)
            - before.total("prompt_tokens_total", source=source)
        )
        for source in ("cached", "recomputed", "fresh")
    }
    counted["output"] = after.total("output_tokens_total") - before.total("output_tokens_total")
    got = {
        "cached": calm.cached_tokens,
        "recomputed": calm.recomputed_tokens,
        "fresh": calm.prompt_tokens - calm.cached_tokens - calm.recomputed_tokens,
        "output": calm.output_tokens,
    }
    shown = ", ".join(f"{name} {counted[name]} and {got[name]}" for name in got)
    return ReportCheck(
        "tokens counted",
        counted == got,
        f"by the server and by clients, of {calm.complete} answers: {shown}",
    )


def check_idle_server(figures: Figures) -> ReportCheck:
    """Check that an idle server holds nothing for requests."""
    running, waiting, slots = map(
        figures.total, ("requests_running", "requests_waiting", "kv_slots_used")
    )
    return ReportCheck(
        "held by requests",
        not (running or waiting or slots),
        f"{slots} slots used, {running} requests running and {waiting} waiting when all were"
        " answered",
    )


def check_audit(figures: Figures) -> ReportCheck:
    """Check that every answer that the audit took was compared."""
    pending, failed = (
        figures.total("audit_pending"),
        figures.total("audit_skipped_total", reason="failed"),
    )
    return ReportCheck(
        "audit",
        not (pending or failed),
        f"{figures.total('audit_samples_total')} answers compared, {pending} pending, {failed}"
        f" failed; {figures.total('audit_skipped_total')} skipped",
    )


def check_disk_index(figures: Figures, sizes: Sequence[int]) -> ReportCheck:
    """Check that the disk tier knows just what lies there; ``sizes`` are those of the chunk files
    in bytes."""
    chunks, nbytes = (figures.total(name, tier="disk") for name in ("store_chunks", "store_bytes"))
    return ReportCheck(
        "disk index",
        (chunks, nbytes) == (len(sizes), sum(sizes)),
        f"{chunks} chunks of {nbytes} bytes in the index, {len(sizes)} files of {sum(sizes)} bytes"
        " on the disk",
    )


def check_deletions(caches: int, figures: Figures, files: int) -> ReportCheck:
    """Check that no chunk outlives the deletion of all context caches."""
    chunks = figures.total("store_chunks")
    return ReportCheck(
        "deleted",
        not (caches or chunks or files),
        f"{caches} context caches, {chunks} chunks in tiers and {files} chunk files once all were"
        " deleted",
    )


def check_log(log: str) -> ReportCheck:
    """Check that a server logged no error."""
    errors = [
        line for line in log.splitlines() if " ERROR " in line or line.startswith("Traceback")
    ]
    return ReportCheck(
        "log",
        not errors,
        f"{len(errors)} errors" + "".join(f"; {line:.200}" for line in errors[:1]),
    )
