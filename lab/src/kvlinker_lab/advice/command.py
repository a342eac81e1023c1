"""``kvlinker-lab advise``: recommends the cheapest tier whose loading a policy's recomputation
hides."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from kvlinker.cli.bench.common import (
    MODEL_OPTIONS,
    Json,
    Shape,
    command_line,
    require_folders,
    show,
)
from kvlinker.cli.console import BAD_USAGE, FAILURE, fail, failures, progress_display, warn
from kvlinker.cli.options import settings_options
from kvlinker.settings import SHARED_TIER_SETTINGS, Settings
from kvlinker_lab.advice.recommendation import EXAMPLE_PRICES, parse_prices

if TYPE_CHECKING:
    from kvlinker.quality.bench.harness.report import Row
    from kvlinker_lab.advice.recommendation import TierFigures

TIER_OPTIONS = ("state_dir", "host_memory", "disk_space", "disk_codec", *SHARED_TIER_SETTINGS)
CODEC_OPTIONS = ("redis_codec", "object_codec")
DEFAULT_CONTEXT_TOKENS = 4096
"""The tokens of the context that is loaded, where the model takes as many: eight chunks of 512."""

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
    policy: Annotated[
        str, typer.Option(help="The policy whose recomputation is to hide loading.")
    ] = "cacheblend-15",
    context_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=(
                f"Tokens of the context that is loaded; {DEFAULT_CONTEXT_TOKENS} by default, or"
                " what the model takes."
            ),
            show_default=False,
        ),
    ] = None,
    price: Annotated[
        list[str] | None,
        typer.Option(
            help=(
                "Price of a tier per GB and month; may be given several times. Examples stand in:"
                f" {_PRICES}."
            ),
            metavar="TIER=NUMBER",
            show_default=False,
        ),
    ] = None,
    json: Json = None,
) -> None:
    """Measure this machine's prefill and its tiers, and recommend the cheapest tier whose loading
    the policy hides.

    Samples are written to each configured tier, next to its chunks, read as a prompt's chunks are,
    and removed.
    """
    from kvlinker.linking import parse_policy
    from kvlinker.quality.bench.harness.benchmark import Setup
    from kvlinker_lab.advice.measurement import advise as measure
    from kvlinker_lab.advice.recommendation import explain_recommendation, recommend

    with failures(BAD_USAGE), progress_display() as progress:
        require_folders(json)
        prices = parse_prices(price or [], settings.tiers)
        name = parse_policy(policy).name
        subject = Setup(settings, shape, command_line("kvlinker-lab")).subject(policy=name)
        length = context_tokens or min(DEFAULT_CONTEXT_TOKENS, subject.loaded.context_window - 1)
        advice = measure(
            subject, settings, name, context_tokens=length, prices=prices, progress=progress
        )
    chosen = recommend(advice.tiers)
    report = subject.report([_row(tier, chosen) for tier in advice.tiers])
    measured = {
        "percent": round(advice.percent, 2),
        "context_tokens": length,
        "prefill_ms": round(1e3 * advice.prefill_seconds, 1),
    }
    show(replace(report, settings={**report.settings, **measured}, columns=COLUMNS), json)
    for tier, problem in advice.failed.items():
        warn(f"tier {tier} was not measured: {problem}")
    if not advice.tiers:
        raise fail("no tier was measured", FAILURE)
    typer.echo(f"{name} recomputes {advice.percent:.3g}% of {length} tokens.")
    for line in explain_recommendation(advice.tiers):
        typer.echo(line)


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
