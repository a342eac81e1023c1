"""Makes the comparison with other engines a benchmark: its options, its rounds and its rows."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from kvlinker.base.errors import InvalidRequestError
from kvlinker.engines.contract.gguf_files import gguf_files
from kvlinker.linking import parse_policy
from kvlinker.quality.bench.harness.benchmark import (
    ChunkTokens,
    Repeat,
    Setup,
    benchmark,
    counts,
    names,
)
from kvlinker.quality.bench.harness.measurement import in_turn
from kvlinker.quality.bench.harness.report import Report, Row
from kvlinker_lab.peers.peer import PeerKind, Task, find_peer, known_peers
from kvlinker_lab.peers.processes import is_installed, parse_pythons, run_peer
from kvlinker_lab.peers.worker import Measured

COLUMNS = ("case", "system", "ms", "mb", "correlation", "ratio_to_kvlinker")
SYSTEMS = "kvlinker,kvlinker-vllm,vllm,transformers,llama.cpp"
REFERENCE = "kvlinker"
"""The system that the others are set beside."""
SAME_TEXT = "log probabilities"
"""The case that shows whether systems run the same model, by the correlation of their log
probabilities of one text."""
SAME_MODEL = 0.9
"""The correlation of log probabilities below which two systems cannot be running the same model."""


@benchmark("peers")
def peers(
    setup: Setup,
    *,
    systems: Annotated[
        str,
        typer.Option(
            help=(
                "What to compare, with commas between; also kvlinker-int8, -int4, llama.cpp-q8_0,"
                " -q4_0."
            )
        ),
    ] = SYSTEMS,
    python: Annotated[
        list[str] | None,
        typer.Option(
            help="PROGRAM=PATH: Python of the environment that vllm or llama.cpp is installed in."
        ),
    ] = None,
    prefill_tokens: Annotated[
        int, typer.Option(min=2, help="Length of the prompt that is prefilled.")
    ] = 2048,
    batches: Annotated[
        str, typer.Option(help="Requests that decode at once, with commas between.")
    ] = "1,4,16",
    context_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens that each request decodes behind.")
    ] = 512,
    chunks: Annotated[
        int,
        typer.Option(
            min=0,
            help="Linked chunks that requests of kvlinker share in cases of their own; 0: none.",
        ),
    ] = 8,
    chunk_tokens: ChunkTokens = 512,
    policy: Annotated[str, typer.Option(help="How chunks are linked.")] = "legolink-16",
    steps: Annotated[int, typer.Option(min=4, help="Tokens to decode.")] = 24,
    repeat: Repeat = 3,
) -> Report:
    """Measure kvlinker beside vLLM, transformers and llama.cpp: loading, prefill, decoding and
    memory.

    All run the same weights, each in a process of its own that every round starts anew. Where the
    model is a GGUF file, kvlinker and llama.cpp read that, and others what it was unpacked into.
    """
    kinds = [find_peer(name) for name in dict.fromkeys(names(systems))]
    given = parse_pythons(
        python or (), {kind.program for kind in known_peers().values() if kind.program}
    )
    pythons = {kind.name: given.get(kind.program, sys.executable) for kind in kinds}
    measured = {
        "prefill_tokens": prefill_tokens,
        "batches": counts(batches),
        "context_tokens": context_tokens,
        "chunks": chunks,
        "chunk_tokens": chunk_tokens,
        "policy": parse_policy(policy).name,
        "steps": steps,
    }
    with tempfile.TemporaryDirectory(prefix="kvlinker-bench-") as folder:
        task, report = _prepare(setup, Path(folder), repeat=repeat, **measured)
        running, warnings = _choose(kinds, pythons, task)
        taken = in_turn(
            {
                kind.name: partial(run_peer, replace(task, peer=kind.name), pythons[kind.name])
                for kind in running
            },
            repeat=repeat,
            progress=setup.progress,
        )
    correlations = _correlations(taken)
    versions = {
        name: version for runs in taken.values() for name, version in runs[0].versions.items()
    }
    return replace(
        report,
        versions={**report.versions, **versions},
        rows=[
            *_rows(taken),
            *(
                {"case": SAME_TEXT, "system": name, "correlation": found}
                for name, found in correlations.items()
            ),
        ],
        columns=COLUMNS,
        notes=[_own_part([runs[0] for runs in taken.values()])],
        warnings=[*warnings, *_doubts(correlations)],
    )


def _prepare(setup: Setup, folder: Path, *, repeat: int, **measured: Any) -> tuple[Task, Report]:
    """Write the model into the folder, for every process to load, unless it is a GGUF file; return
    what peers are to do, and an empty report."""
    subject = setup.subject(repeat=repeat, **measured)
    loaded = subject.loaded
    gguf = gguf_files(setup.settings.model) if setup.shape is None else ()
    if gguf:
        from kvlinker.engines.contract.gguf_unpacking import with_folder

        model = Path(with_folder(setup.settings).model)
    else:
        model = folder / "model"
        setup.progress(f"writing {subject.name}")
        setup.transformer().save_pretrained(model)
        loaded.tokenizer.save_pretrained(model)
    report = subject.report([])
    task = Task(
        peer="",
        model=str(model),
        folder=str(folder),
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=str(loaded.device),
        threads=report.machine["threads"],
        vocabulary=loaded.model.config.vocab_size,
        kv_bytes_per_token=loaded.kv_bytes_per_token,
        vllm_options=setup.settings.vllm_options,
        gguf=str(gguf[0].resolve()) if gguf else "",
        **measured,
    )
    return task, report


def _choose(
    kinds: Sequence[PeerKind], pythons: Mapping[str, str], task: Task
) -> tuple[list[PeerKind], list[str]]:
    """Return the peers that can run the task here, and say of each of the others why not."""
    model_type = json.loads((Path(task.model) / "config.json").read_text())["model_type"]
    running, reasons = [], []
    for kind in kinds:
        if not is_installed(kind, pythons[kind.name]):
            reasons.append(
                f"{kind.name} is left out, for it is not installed: {kind.installation}."
            )
        elif task.gguf and kind.quantises:
            reasons.append(f"{kind.name} is left out: it quantises a model by itself.")
        elif not task.gguf and kind.model_types is not None and model_type not in kind.model_types:
            reasons.append(
                f"{kind.name} is left out: it takes {', '.join(kind.model_types)}, not"
                f" {model_type}."
            )
        else:
            running.append(kind)
    if not running:
        raise InvalidRequestError(
            " ".join(reasons) or "There are no systems to compare.", param="systems"
        )
    return running, reasons


def _rows(taken: Mapping[str, Sequence[Measured]]) -> Iterator[Row]:
    """Make a row of medians for each case and each system that it was measured of."""
    for column, scale, read in (("ms", 1e3, _seconds), ("mb", 1e-6, _bytes)):
        measured = {name: [read(one) for one in runs] for name, runs in taken.items()}
        for case in dict.fromkeys(case for runs in measured.values() for case in runs[0]):
            medians = {
                name: scale * statistics.median(one[case] for one in runs)
                for name, runs in measured.items()
                if case in runs[0]
            }
            reference = medians.get(REFERENCE)
            for name, median in medians.items():
                ratio = None if reference is None else median / reference
                yield {"case": case, "system": name, column: median, "ratio_to_kvlinker": ratio}


def _seconds(measured: Measured) -> Mapping[str, float]:
    return measured.seconds


def _bytes(measured: Measured) -> Mapping[str, float]:
    return {"peak memory": measured.peak_bytes}


def _correlations(taken: Mapping[str, Sequence[Measured]]) -> dict[str, float]:
    """Return by system how log probabilities of the same text correlate with those of transformers,
    or of the first system that tells them where transformers takes no part."""
    logprobs = {
        name: runs[0].logprobs for name, runs in taken.items() if runs[0].logprobs is not None
    }
    if not logprobs:
        return {}
    expected = logprobs.get("transformers") or next(iter(logprobs.values()))
    return {name: float(np.corrcoef(found, expected)[0, 1]) for name, found in logprobs.items()}


def _own_part(measured: Sequence[Measured]) -> str:
    """Say what of each process's figures is not its system's."""
    seconds = statistics.median(each.own_seconds for each in measured)
    megabytes = statistics.median(each.own_bytes for each in measured) / 1e6
    return (
        f"Loading and peak memory have the comparison's own part in them: {seconds:.1f} s and"
        f" {megabytes:.0f} MB, which kvlinker would take for itself anyway."
    )


def _doubts(correlations: Mapping[str, float]) -> list[str]:
    return [
        f"{name} does not run the same model: its log probabilities correlate with the others' by"
        f" {correlation:.3f}."
        for name, correlation in correlations.items()
        if correlation < SAME_MODEL
    ]
