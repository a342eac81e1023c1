"""``kvlinker-lab models``: which classes of models can be linked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from kvlinker.base.errors import InvalidRequestError
from kvlinker.cli.console import BAD_USAGE, failures, progress_display
from kvlinker.engines.contract.joining import is_installed

if TYPE_CHECKING:
    from kvlinker_lab.models.verdicts import Verdict

PAGE = Path("docs/models.md")
"""Where the embedded engine's table is, which says what vLLM has to try."""


def models(
    kinds: Annotated[
        list[str] | None,
        typer.Argument(help="Names of configurations, as llama; by default all.", metavar="KIND"),
    ] = None,
    engine: Annotated[
        Literal["embedded", "vllm"],
        typer.Option(help="Whose linking to try; by default, vllm tries what embedded links."),
    ] = "embedded",
    page: Annotated[
        Path | None,
        typer.Option(help="Write the table into this page.", exists=True, dir_okay=False),
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option(help="With vllm: keep verdicts in this JSON file, and go on from there."),
    ] = None,
    seconds: Annotated[
        float, typer.Option(help="With vllm: the most that one model may take.", min=1)
    ] = 600,
) -> None:
    """Try a small random model of every causal language model class of transformers: is it
    linked?"""
    from kvlinker_lab.models.small_models import KINDS
    from kvlinker_lab.models.verdicts import counts, table, verdict, write_table

    with failures(BAD_USAGE):
        if kinds and page is not None:
            raise InvalidRequestError(
                f"A table of {', '.join(kinds)} alone would take the place of all in {page}: leave"
                " the KINDs or --page out."
            )
        unknown = sorted(set(kinds or ()) - set(KINDS))
        if unknown:
            raise InvalidRequestError(f"transformers has no causal model {', '.join(unknown)}.")
        if engine == "vllm":
            chosen = kinds or linked_kinds(page or PAGE)
            made = in_vllm(chosen, results, seconds)
        else:
            chosen = kinds or KINDS
            made = map(verdict, chosen)
        found: list[Verdict] = []
        with progress_display() as progress:
            progress(chosen[0], 0, len(chosen))
            for each in made:
                found.append(each)
                progress(chosen[len(found) % len(chosen)], len(found), len(chosen))
        if page is None:
            typer.echo(f"{table(found)}\n\n{counts(found)}")
        else:
            write_table(page, found, engine)
            typer.echo(counts(found))


def linked_kinds(page: Path) -> Sequence[str]:
    """Return the classes that the embedded engine links, as a page has it. Raises
    InvalidRequestError where there is none."""
    from kvlinker_lab.models.verdicts import read_linked

    if not page.exists():
        raise InvalidRequestError(
            f"{page}, which says what the embedded engine links, is not here: name the KINDs."
        )
    return [kind for kind, linked in read_linked(page).items() if linked]


def in_vllm(kinds: Sequence[str], results: Path | None, seconds: float) -> Iterator[Verdict]:
    """Try classes in vLLM. Raises InvalidRequestError where kvlinker-vllm is not installed."""
    from kvlinker_lab.models.vllm_verdicts import VerdictsFile, verdicts_in_vllm

    if not is_installed("vllm"):
        raise InvalidRequestError(
            "kvlinker-vllm is not installed here: run this in vLLM's own environment, as"
            " .venv-vllm/bin/kvlinker-lab."
        )
    return verdicts_in_vllm(kinds, VerdictsFile(results), seconds=seconds)
