"""The benchmark ``load``: its options, its servers, its table and its plot."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from kvlinker.base.errors import InvalidRequestError
from kvlinker.quality.bench.harness.benchmark import (
    Chunks,
    ChunkTokens,
    FreshTokens,
    Setup,
    benchmark,
    counts,
)
from kvlinker.quality.bench.harness.report import Report, describe_machine, versions
from kvlinker.settings import Settings
from kvlinker_lab.load.driver import ClosedLoop, OpenLoop
from kvlinker_lab.load.prompts import PLAIN
from kvlinker_lab.load.report import COLUMNS, ServiceObjective, plot_load
from kvlinker_lab.load.run import (
    EMBEDDED,
    Competitor,
    LoadPlan,
    Start,
    competing_policies,
    run_load,
)
from kvlinker_lab.load.servers import Server, kvlinker_server, model_to_serve
from kvlinker_lab.load.traffic import TrafficShape

VLLM = "vllm"
POLICIES = "full,plain,reordered,cacheblend-15,legolink-16"


@benchmark("load", settings=("audit",), plot=plot_load)
def load(
    setup: Setup,
    *,
    url: Annotated[
        str | None,
        typer.Option(help="Measure the OpenAI-compatible server that runs here, and start none."),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="KVLINKER_API_KEY", help="The key for --url.")
    ] = None,
    policies: Annotated[
        str | None,
        typer.Option(
            help=(
                "With commas between: linking policies, plain (documents as text), reordered (as"
                " text, ordered for "
                f"prefix hits); {POLICIES} by default, and plain with --url."
            ),
            show_default=False,
        ),
    ] = None,
    rates: Annotated[
        str,
        typer.Option(
            help="Requests per second that arrive by chance (Poisson), with commas between."
        ),
    ] = "",
    users: Annotated[
        str,
        typer.Option(
            help="Users who each wait for their answer, with commas between; 16 without --rates."
        ),
    ] = "",
    requests: Annotated[
        int, typer.Option(min=1, help="Requests of each rate, and of each number of users.")
    ] = 64,
    traffic: Annotated[
        str,
        typer.Option(
            help="documents: single questions; conversation: several turns; agent: tools and steps."
        ),
    ] = "documents",
    library: Annotated[int, typer.Option(min=1, help="Documents that questions are about.")] = 24,
    chunks: Chunks = 4,
    chunk_tokens: ChunkTokens = 512,
    fresh_tokens: FreshTokens = 32,
    output_tokens: Annotated[
        str, typer.Option(help="Tokens of each answer: 32, or from 16 to 128 by 16-128.")
    ] = "32",
    turns: Annotated[
        int, typer.Option(min=1, help="Turns of each conversation, or steps of an agent.")
    ] = 4,
    think: Annotated[
        float, typer.Option(min=0, help="Seconds from an answer to the user's next turn.")
    ] = 1.0,
    zipf: Annotated[
        float, typer.Option(min=0, help="How unequally popular documents are; 0: equally.")
    ] = 1.0,
    warm_up: Annotated[
        int, typer.Option(min=1, help="Conversations before the first load, which do not count.")
    ] = 2,
    slo_ttft: Annotated[
        float, typer.Option(min=0, help="Seconds to the first token of a good answer, at most.")
    ] = 10.0,
    slo_tpot: Annotated[
        float, typer.Option(min=0, help="Milliseconds per token of a good answer, at most.")
    ] = 250.0,
    patience: Annotated[
        float, typer.Option(min=0, help="Seconds after which a request is cancelled.")
    ] = 600.0,
    seed: Annotated[int, typer.Option(min=0, help="Another seed makes other traffic.")] = 0,
) -> Report:
    """Measure servers under load: throughput, latency, goodput, memory, and the share computed
    again.

    Every competitor gets a server of its own and the same traffic. With --engine vllm, vLLM's is
    compared with the embedded engine's.
    """
    from kvlinker.engines.contract.model_files import choose_device, choose_dtype

    shape = TrafficShape(
        kind=traffic,
        library=library,
        chunks=chunks,
        chunk_tokens=chunk_tokens,
        fresh_tokens=fresh_tokens,
        output_tokens=_lengths(output_tokens),
        turns=turns,
        think_seconds=think,
        zipf=zipf,
    )
    open_loops = [OpenLoop(rate) for rate in _rates(rates)]
    closed_loops = (
        [ClosedLoop(number) for number in counts(users or "16")] if users or not open_loops else []
    )
    plan = LoadPlan(
        shape=shape,
        loads=[*open_loops, *closed_loops],
        requests=requests,
        objective=ServiceObjective(slo_ttft, slo_tpot / 1e3),
        warm_up=warm_up,
        patience=patience,
        seed=seed,
    )
    settings_shown = {
        "traffic": traffic,
        "requests": requests,
        "library": library,
        "chunks": f"{chunks} × {chunk_tokens}",
        "fresh_tokens": fresh_tokens,
        "output_tokens": output_tokens,
        **({} if traffic == "documents" else {"turns": turns, "think_seconds": think}),
        "zipf": zipf,
        "slo_ttft_s": slo_ttft,
        "slo_tpot_ms": slo_tpot,
        "seed": seed,
    }
    device = choose_device(setup.settings.device)
    if url is not None:
        named = competing_policies(policies or PLAIN)
        place = urlsplit(url).netloc or url
        competitors = [Competitor(policy, place) for policy in named]
        measured = run_load(
            competitors,
            lambda _: nullcontext(Server(url)),
            plan,
            api_key=api_key,
            progress=setup.progress,
        )
        settings_shown = {"model": f"served at {place}", "dtype": "unknown", **settings_shown}
    else:
        engines = [EMBEDDED, VLLM] if setup.settings.engine == VLLM else [EMBEDDED]
        named = competing_policies(policies or POLICIES)
        competitors = [Competitor(policy, engine) for engine in engines for policy in named]
        with model_to_serve(setup.settings, setup.shape) as settings:
            measured = run_load(competitors, starter(settings), plan, progress=setup.progress)
        dtype = str(choose_dtype(setup.settings.dtype, device)).removeprefix("torch.")
        settings_shown = {
            "model": setup.shape or settings.served_name,
            "dtype": dtype,
            **settings_shown,
            "audit": settings.audit,
        }

    return Report(
        command=setup.command,
        machine=describe_machine(device),
        versions=versions(),
        settings=settings_shown,
        rows=measured.rows,
        columns=[
            column for column in COLUMNS if any(row[column] is not None for row in measured.rows)
        ],
        warnings=measured.warnings,
    )


def starter(settings: Settings) -> Start:
    """Make what starts a new server of the settings' model for each competitor, with its engine.

    The embedded engine keeps context caches in memory alone, as vLLM cannot. ``full`` has no prefix
    cache and computes everything; prefix caches are what ``plain`` and ``reordered`` are about.
    Answers are audited as the settings say.
    """

    def start(competitor: Competitor) -> AbstractContextManager[Server]:
        reuses = competitor.policy != "full"
        own: dict[str, Any] = {
            "disk_space": 0,
            "prefix_cache": "on" if reuses else "off",
            "audit": settings.audit,
        }
        if competitor.engine == VLLM:
            own = {"vllm_options": {"enable_prefix_caching": reuses}}
        return kvlinker_server(settings.model_copy(update={"engine": competitor.engine}), **own)

    return start


def _rates(text: str) -> list[float]:
    """Read numbers above 0 with commas between, or none. Raises InvalidRequestError for others."""
    try:
        found = [float(part) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise InvalidRequestError(
            f"{text!r} is not a list of numbers with commas between.", param="rates"
        ) from error
    if not all(0 < rate < float("inf") for rate in found):
        raise InvalidRequestError(f"{text!r}: every rate must be above 0.", param="rates")
    return found


def _lengths(text: str) -> tuple[int, int]:
    """Read a number of tokens, or the least and the most with a hyphen between. Raises
    InvalidRequestError."""
    least, _, most = text.partition("-")
    try:
        return int(least), int(most or least)
    except ValueError as error:
        raise InvalidRequestError(
            f"{text!r} is no number of tokens, such as 32 or 16-128.", param="output_tokens"
        ) from error
