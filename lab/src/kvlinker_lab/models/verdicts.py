"""Says of every causal language model class of transformers if it is linked, and makes a table of
it."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvlinker.base.errors import InvalidRequestError, UnsupportedModelError
from kvlinker.engines.embedded.model.bounds import context_window, said_window
from kvlinker.engines.embedded.model.obstacles import EXHAUSTED, Obstacle
from kvlinker.engines.embedded.selftest import refusal_after, self_test
from kvlinker_lab.models.small_models import NOT_MADE, small_model

COMMANDS = {"embedded": "kvlinker-lab models", "vllm": "kvlinker-lab models --engine vllm"}
"""The commands that make each engine's table, which stands on a page between lines that name
it."""

UNMEASURED = "relocate"
"""The check whose error is that of angles in fp32, whatever the model."""

NEWLY_SEEN = "for no reason that is known"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Says if models of a class are linked.

    ``error`` is the largest of the self-test's, relative to the model's own logits, or, in vLLM,
    the largest difference of a log probability from the embedded engine's; None where the class is
    refused, and ``reason`` says why, perhaps with a ``detail`` of one model.
    """

    kind: str
    error: float | None = None
    bounded: bool = False
    reason: str = ""
    detail: str = ""


def verdict(kind: str) -> Verdict:
    """Try a small random model of this class."""
    if kind in NOT_MADE:
        return Verdict(kind, reason=f"not tried here: {NOT_MADE[kind]}")
    try:
        model = small_model(kind)
        checks = self_test(model)
        error = refusal_after(model, checks)
        if error is not None:
            raise error
        window, said = context_window(model), said_window(model)
    except UnsupportedModelError as refused:
        return Verdict(kind, reason=_reason(refused))
    except EXHAUSTED:
        raise
    except Exception as error:  # a mistake of ours: the table shows it
        return Verdict(kind, reason=failure(error))
    most = max(check.error for check in checks if check.name != UNMEASURED)
    return Verdict(kind, error=most, bounded=said is not None and window < said)


def failure(error: Exception) -> str:
    """Return the reason for an unforeseen error."""
    return f"{NEWLY_SEEN} ({type(error).__name__}: {error})"


def table(verdicts: Sequence[Verdict]) -> str:
    """Make a Markdown table: a row for the classes that are linked exactly, one for those in a
    bounded context, with their largest error, and one for each reason why others are not."""
    linked: dict[str, list[Verdict]] = {}
    refused: dict[str, list[str]] = {}
    for each in sorted(verdicts, key=lambda found: found.kind):
        if each.error is None:
            refused.setdefault(_shorten(each.reason), []).append(f"`{each.kind}`")
        else:
            how = "in a bounded context" if each.bounded else "exactly"
            linked.setdefault(how, []).append(each)
    lines = ["| classes | linked | largest error |", "|---|---|---:|"]
    for how, found in sorted(linked.items()):
        kinds = ", ".join(f"`{each.kind}`" for each in found)
        lines.append(f"| {kinds} | {how} | {max(each.error or 0 for each in found):.0e} |")
    for reason, names in sorted(refused.items(), key=lambda item: -len(item[1])):
        lines.append(f"| {', '.join(names)} | no: {reason} | |")
    return "\n".join(lines)


def counts(verdicts: Sequence[Verdict]) -> str:
    """Count the verdicts in a sentence."""
    linked = [each for each in verdicts if each.error is not None]
    bounded = sum(each.bounded for each in linked)
    return (
        f"{len(linked)} of {len(verdicts)} classes are linked exactly, {bounded} of these in a"
        f" bounded context; {len(verdicts) - len(linked)} are not."
    )


def read_linked(page: Path, engine: str = "embedded") -> Mapping[str, bool]:
    """Read from a page's table which classes are linked."""
    _, rows, _ = _parts(page, engine)
    return dict(_linked_kinds(rows.splitlines()))


def write_table(page: Path, verdicts: Sequence[Verdict], engine: str = "embedded") -> None:
    """Replace an engine's table on a page. Raises InvalidRequestError where it has none."""
    before, _, after = _parts(page, engine)
    sentence = textwrap.fill(counts(verdicts), 100)
    page.write_text(f"{before}\n{sentence}\n\n{table(verdicts)}\n{after}", encoding="utf-8")


def _parts(page: Path, engine: str) -> tuple[str, str, str]:
    """Return a page's text up to an engine's table, the table, and the text from there on."""
    text = page.read_text(encoding="utf-8")
    begin, end = f"<!-- {COMMANDS[engine]} -->", f"<!-- end of {COMMANDS[engine]} -->"
    if begin not in text or end not in text:
        raise InvalidRequestError(
            f"{page} has no place for the table: it goes between the lines {begin} and {end}."
        )
    before, rest = text.split(begin, 1)
    rows, after = rest.split(end, 1)
    return before + begin, rows, end + after


def _shorten(reason: str) -> str:
    """Return a reason without the names and figures of one model, and without the way out."""
    general = re.sub(r"\b\w+For(CausalLM|ConditionalGeneration)\b", "the model", reason)
    general = re.sub(r" \(layer [^)]*\)| \([^()]*\d\.\de[-+]\d+\)", "", general)
    general = re.sub(r" [\w.]*layers\.\d[\w.]*", "", general)
    general = re.sub(r" of type '.*", " of this type", general)
    return re.split(r"\.? Relative errors over|; serve |: if ", general)[0].replace("|", "/")


def _linked_kinds(rows: Sequence[str]) -> Iterator[tuple[str, bool]]:
    for row in rows:
        if row.startswith("| `"):
            kinds, linked, *_ = (cell.strip() for cell in row.strip("|").split("|"))
            yield from (
                (kind.strip(" `"), not linked.startswith("no:")) for kind in kinds.split(",")
            )


def _reason(error: UnsupportedModelError) -> str:
    """Return the kind of obstacle that a refusal names, else all of it."""
    named = (each.value for each in Obstacle if f"not supported yet: {each}. " in error.message)
    return next(named, error.message)
