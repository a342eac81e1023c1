"""``kvlinker calibrate``: how little may be recomputed for a quality that is wanted?"""

from __future__ import annotations

from typing import Annotated

import typer

from kvlinker.cli.bench.common import MODEL_OPTIONS, progress_bar
from kvlinker.cli.failures import BAD_USAGE, FAILURE, failures
from kvlinker.cli.options import settings_options
from kvlinker.config import Settings
from kvlinker.research.evaluation.contexts import ContextSplit

ALPHAS = "0.05,0.1,0.2,0.3,0.5,0.75,1,1.5,2"


@settings_options(*MODEL_OPTIONS)
def calibrate(
    settings: Settings,
    policy: Annotated[
        str, typer.Argument(help="A policy with {} for the number, such as cachecraft-{}-focus or legolink-{}.")
    ] = "cachecraft-{}",
    target: Annotated[float, typer.Option(min=0, max=2, help="Wanted score, as a share of full prefill's.")] = 0.95,
    values: Annotated[str, typer.Option(help="Numbers to try, with commas between.")] = ALPHAS,
    dataset: Annotated[
        str, typer.Option(help="Validation set: reader, or a file of questions as bench quality takes it.")
    ] = "reader",
    limit: Annotated[int | None, typer.Option(min=1, help="Most examples.")] = None,
    split: Annotated[ContextSplit, typer.Option(help="Chunks are passages, or windows of equal length.")] = (
        ContextSplit.SEMANTIC
    ),
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Tokens per chunk.")] = 512,
) -> None:
    """Find the setting of a policy that recomputes least and still reaches a quality, on a validation set."""
    from rich.console import Console
    from rich.table import Table

    from kvlinker.research.bench.subject import make_subject
    from kvlinker.research.evaluation.answers import Examiner
    from kvlinker.research.evaluation.calibration import calibrate, settings_of
    from kvlinker.research.evaluation.contexts import ContextSplitter
    from kvlinker.research.evaluation.datasets import load_dataset

    with failures(BAD_USAGE):
        policies = settings_of(policy, values.split(","))
        subject = make_subject(settings, shape=None, command="kvlinker calibrate")
        with subject.llm(disk_space=0) as llm, progress_bar() as advance:
            splitter = ContextSplitter(llm.builder.encoder, split, chunk_tokens)
            examples = load_dataset(dataset, splitter, limit=limit).examples
            found = calibrate(Examiner(llm), examples, policies, target=target, progress=advance)
    table = Table("policy", "examples", "score", "of full", "recomputed")
    for setting in found.settings:
        style = "bold" if setting == found.chosen else ""
        row = (f"{setting.score:.3f}", f"{setting.of_full:.1%}", f"{setting.recomputed_fraction:.1%}")
        table.add_row(setting.policy, str(setting.n), *row, style=style)
    Console().print(table)
    if found.skipped:
        typer.echo(f"{len(found.skipped)} examples skipped, the first: {found.skipped[0].reason}", err=True)
    if found.chosen is None:
        typer.echo(f"None of them reaches {target:.0%} of full's score. Try other --values.", err=True)
        raise typer.Exit(FAILURE)
    typer.echo(f"{found.chosen.policy} reaches {target:.0%} of full's score with the least recomputation.")
