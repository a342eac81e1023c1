"""Measures how much of the requests of coding agents is read from the cache: in the next turn, in
another repository, and behind an edit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, get_args

import httpx
import typer

from kvlinker.base.errors import InvalidRequestError
from kvlinker.quality.bench.harness.benchmark import Setup, benchmark, names
from kvlinker.quality.bench.harness.report import Report, Row
from kvlinker.quality.bench.harness.subject import MeasuredModel
from kvlinker.quality.progress import Progress, silent
from kvlinker.settings import Settings
from kvlinker_lab.agent_bodies import AGENTS, CASES, Request
from kvlinker_lab.serving import serve_llm

COLUMNS = ("agent", "implicit", "case", "tokens", "read", "share")

KV_SLOTS = 65_536
"""The tokens of one agent's requests, which is asked alone."""


@benchmark("agent-replays", settings=("policy",))
def agent_replays(
    setup: Setup,
    *,
    agents: Annotated[
        str, typer.Option(help="Agents whose requests are replayed, with commas between.")
    ] = ",".join(AGENTS),
    implicit: Annotated[
        str | None,
        typer.Option(
            help=(
                "Values of the setting implicit, with commas between; by default all but marked,"
                " since agents mark nothing."
            ),
            show_default=False,
        ),
    ] = None,
) -> Report:
    """Measure the tokens that coding agents' requests read from the cache, by the setting implicit.

    Each agent has a server of its own, which is asked one request after the other, and computes
    what it likes in between. A table in Markdown follows the figures.
    """
    settings = get_args(Settings.model_fields["implicit"].annotation)
    unmarked = [setting for setting in settings if setting != "marked"]
    chosen = names(agents), names(implicit) if implicit else unmarked
    for given, known in zip(chosen, (AGENTS, settings), strict=True):
        if unknown := set(given) - set(known):
            raise InvalidRequestError(f"{min(unknown)!r} is none of {', '.join(known)}.")
    subject = setup.subject(policy=setup.settings.usual_policy)
    return run_agent_replays(
        subject, *chosen, policy=setup.settings.usual_policy, progress=setup.progress
    )


def run_agent_replays(
    subject: MeasuredModel,
    agents: Sequence[str],
    implicit: Sequence[str],
    *,
    policy: str,
    scale: float = 1.0,
    progress: Progress = silent,
) -> Report:
    """Replay the requests of each agent under each value of the setting ``implicit``, with the
    share ``scale`` of their texts."""
    rows: list[Row] = []
    for agent in agents:
        for setting in implicit:
            options: dict[str, Any] = {"implicit": setting, "policy": policy}
            with (
                subject.llm(kv_slots=KV_SLOTS, prefix_cache="on", **options) as llm,
                serve_llm(llm) as url,
            ):
                for case, sessions in CASES.items():
                    progress(f"{agent}, implicit {setting}: {case}")
                    for session in sessions:
                        request = AGENTS[agent](replace(session, scale=scale))
                        tokens, read = _count_cached(url, request)
                        llm.settle()
                    row = {"agent": agent, "implicit": setting, "case": case, "tokens": tokens}
                    rows.append(row | {"read": read, "share": read / tokens})
    return replace(subject.report(rows), columns=COLUMNS, notes=_markdown(rows))


def _count_cached(url: str, request: Request) -> tuple[int, int]:
    """Return the tokens of a request's prompt, and how many of them are read from the cache."""
    limit = "max_output_tokens" if request.path == "/v1/responses" else "max_tokens"
    body = request.body | {"stream": False, limit: 1}
    body.pop("stream_options", None)
    answer = httpx.post(f"{url}{request.path}", json=body, timeout=None)
    if answer.is_error:
        raise InvalidRequestError(f"{request.path} is answered {answer.text}")
    usage = answer.json()["usage"]
    if "cache_read_input_tokens" in usage:
        created = usage.get("cache_creation_input_tokens") or 0
        read = usage["cache_read_input_tokens"]
        return usage["input_tokens"] + created + read, read
    kind = "input" if "input_tokens" in usage else "prompt"
    return usage[f"{kind}_tokens"], usage[f"{kind}_tokens_details"]["cached_tokens"]


def _markdown(rows: Sequence[Row]) -> list[str]:
    """Return the shares that are read as a table in Markdown, with a column for each case."""
    cases = list(dict.fromkeys(row["case"] for row in rows))
    shares: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        cells = shares.setdefault((row["agent"], row["implicit"]), [])
        cells.append(f"{row['share']:.0%} of {row['tokens']:,}")
    return [
        "| " + " | ".join(("agent", "`implicit`", *cases)) + " |",
        "|" + "---|" * (2 + len(cases)),
        *(
            "| " + " | ".join((agent, f"`{implicit}`", *cells)) + " |"
            for (agent, implicit), cells in shares.items()
        ),
    ]
