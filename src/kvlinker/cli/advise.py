"""``kvlinker advise``: which tiers are fast enough to load from while a policy recomputes, and which is cheapest?"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from kvlinker.cli.bench.common import MODEL_OPTIONS, Json, Shape, command_line, require_folders, show
from kvlinker.cli.console import BAD_USAGE, FAILURE, fail, failures, progress_line, warn
from kvlinker.cli.options import settings_options
from kvlinker.config import SHARED_TIER_SETTINGS, Settings
from kvlinker.research.advice import EXAMPLE_PRICES, parse_prices

if TYPE_CHECKING:
    from kvlinker.research.advice import TierFigures
    from kvlinker.research.bench.report import Row

TIER_OPTIONS = ("state_dir", "host_memory", "disk_space", "disk_codec", *SHARED_TIER_SETTINGS)
CODEC_OPTIONS = ("redis_codec", "object_codec")
DEFAULT_CONTEXT_TOKENS = 4096
COLUMNS = (
    "tier",
    "codec",
    "mb_per_s",
    "busy_percent",
    "load_ms",
    "recompute_ms",
    "hidden",
    "added_ms",
    "hidden_percent",
    "price_gb_month",
    "price_million_tokens_month",
)

_PRICES = ", ".join(f"{tier}={price:g}" for tier, price in EXAMPLE_PRICES.items())


@settings_options(*MODEL_OPTIONS, *TIER_OPTIONS, *CODEC_OPTIONS)
def advise(
    settings: Settings,
    shape: Shape = None,
    policy: Annotated[str, typer.Option(help="The policy whose recomputation is to hide loading.")] = "cacheblend-15",
    context_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Tokens of the context that is loaded; {DEFAULT_CONTEXT_TOKENS} by default, or what the model takes.",
            show_default=False,
        ),
    ] = None,
    price: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Price of a tier per GB and month; may be given several times. Examples stand in: {_PRICES}.",
            metavar="TIER=NUMBER",
            show_default=False,
        ),
    ] = None,
    json: Json = None,
) -> None:
    """Measure this machine's prefill and its tiers, and recommend the cheapest tier whose loading the policy hides.

    Samples are written to each configured tier, beside what it holds, read layer by layer, and removed. What is
    measured is kept in the state directory, where servers begin with it.
    """
    from kvlinker.linking import parse_policy
    from kvlinker.research.advice import recommended
    from kvlinker.research.bench.advising import measure
    from kvlinker.research.bench.subject import make_subject

    with failures(BAD_USAGE), _ending_at_signals(), progress_line() as progress:
        require_folders(json)
        prices = parse_prices(price or [])
        name = parse_policy(policy).name
        subject = make_subject(settings, shape=shape, command=command_line(), policy=name)
        length = context_tokens or min(DEFAULT_CONTEXT_TOKENS, subject.loaded.context_window - 1)
        measured = measure(subject, settings, name, context_tokens=length, prices=prices, progress=progress)
    chosen = recommended(measured.tiers)
    rows: list[Row] = [_row(tier, chosen) for tier in measured.tiers]
    prefill = {f"prefill_{length}_ms": round(1e3 * seconds, 1) for length, seconds in measured.prefill.items()}
    report = subject.report(rows)
    about = {"percent": round(measured.percent, 2), "context_tokens": length}
    report = replace(report, settings=dict(report.settings) | about | prefill)
    show(report, COLUMNS, json)
    for tier, problem in measured.failed.items():
        warn(f"tier {tier} was not measured: {problem}")
    if not measured.kept:
        warn(f"what was measured could not be kept in {settings.state_dir}")
    if not measured.tiers:
        raise fail("no tier was measured", FAILURE)
    typer.echo(_recommendation(measured.tiers, chosen, name, measured.percent, length))


def _recommendation(
    tiers: Sequence[TierFigures], chosen: TierFigures | None, policy: str, percent: float, context_tokens: int
) -> str:
    from kvlinker.research.advice import cheaper, ways_out

    what = f"{policy}, which recomputes {percent:.3g}% of {context_tokens} tokens"
    if chosen is not None:
        times = f"{1e3 * chosen.load_seconds:.0f} ms beside {1e3 * chosen.recompute_seconds:.0f} ms of computation"
        first = f"Recommended: {chosen.tier}, the cheapest tier whose loading is hidden by {what}: {times}."
        others = cheaper(tiers, chosen)
    else:
        first, others = f"No tier's loading is hidden by {what}. What there is:", ways_out(tiers)
    return "\n".join([first, *(f"- {other}" for other in others)])


def _row(tier: TierFigures, chosen: TierFigures | None) -> Row:
    return {
        "tier": tier.tier,
        "codec": tier.codec,
        "mb_per_s": tier.bytes_per_second / 1e6,
        "busy_percent": tier.busy_percent,
        "bytes_per_token": tier.bytes_per_token,
        "load_ms": 1e3 * tier.load_seconds,
        "recompute_ms": 1e3 * tier.recompute_seconds,
        "hidden": tier.hidden,
        "added_ms": 1e3 * tier.added_seconds,
        "hidden_percent": tier.hidden_percent,
        "price_gb_month": tier.price_per_gb,
        "price_million_tokens_month": tier.price_per_million_tokens,
        "recommended": tier is chosen,
    }


@contextmanager
def _ending_at_signals() -> Iterator[None]:
    """Turn signals to end into exceptions, so that samples are removed."""

    def end(number: int, _: FrameType | None) -> None:
        sys.exit(128 + number)

    before = {}
    for number in (signal.SIGTERM, signal.SIGHUP):
        with suppress(ValueError):  # not in the main thread
            before[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
