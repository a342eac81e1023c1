"""Measures with and without reuse what repeats itself: conversations, and prompts that are asked
again."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer

from kvlinker.base.types.chunks import Chunk
from kvlinker.prompting.segments import CachedSegment, FreshSegment, Prompt, Segment
from kvlinker.quality.bench.harness.benchmark import Chunks, ChunkTokens, Repeat, Setup, benchmark
from kvlinker.quality.bench.harness.measurement import Workload, cache_chunks, first_token
from kvlinker.quality.bench.harness.report import Report, Row
from kvlinker.quality.bench.harness.subject import MeasuredModel
from kvlinker.quality.progress import Progress, silent

if TYPE_CHECKING:
    from kvlinker.llm import LLM

COLUMNS = ("case", "way", "policy", "seconds", "ratio_to_reuse")
QUESTION_TOKENS = 32
"""The tokens of a question in a turn. Chosen by hand."""

SPARE_SLOTS = 1024
"""The KV slots beyond those of the prompts, for answers."""


@benchmark("conversation")
def conversation(
    setup: Setup,
    *,
    turns: Annotated[int, typer.Option(min=2, help="Turns of the conversation.")] = 10,
    turn_tokens: Annotated[int, typer.Option(min=1, help="Tokens that each turn adds.")] = 200,
    chunks: Chunks = 8,
    chunk_tokens: ChunkTokens = 512,
    policy: Annotated[
        str | None, typer.Option(help="How chunks are linked; by default as requests are.")
    ] = None,
    repeat: Repeat = 3,
) -> Report:
    """Measure a conversation over linked chunks, a prompt that is asked twice, and one of new
    documents, with and without reuse.

    A turn takes as long as its first token. The third way computes each token once and nothing
    else: all that was said before is a chunk, cached beforehand. The chunks of new documents are
    computed on the way, where a request without reuse has a full prefill.
    """
    named = policy or setup.settings.usual_policy
    subject = setup.subject(repeat=repeat, policy=named, turns=turns, turn_tokens=turn_tokens)
    workload = Workload(chunks, chunk_tokens, turn_tokens)
    return run_conversation(
        subject, workload, turns=turns, policy=named, repeat=repeat, progress=setup.progress
    )


def run_conversation(
    subject: MeasuredModel,
    workload: Workload,
    *,
    turns: int,
    policy: str,
    repeat: int,
    progress: Progress = silent,
) -> Report:
    """Hold ``repeat`` conversations in each way, in turn, after one that does not count;
    ``workload.fresh_tokens`` are those of a turn."""
    vocabulary = subject.loaded.vocabulary
    most = workload.chunks * workload.chunk_tokens + turns * workload.fresh_tokens
    slots = 2 * (repeat + 2) * most + SPARE_SLOTS
    taken: dict[tuple[str, str], list[float]] = {}
    talking = f"{turns} turns of {workload.fresh_tokens} tokens"
    with (
        subject.llm(kv_slots=slots, disk_space=0, prefix_cache="on") as reusing,
        subject.llm(kv_slots=most + SPARE_SLOTS, disk_space=0) as computing,
    ):
        for turn in range(repeat + 1):
            prompts = conversation_prompts(workload, turns, vocabulary, seed=turn)
            for llm in (reusing, computing):
                cache_chunks(llm.engine, prompts[0])
            found: dict[tuple[str, str], float] = {}
            for way, llm in (("reuse", reusing), ("no reuse", computing)):
                progress(f"turn {turn} of {repeat}: a conversation, {way}")
                found[talking, way] = _seconds(llm, prompts, policy)
            progress(f"turn {turn} of {repeat}: each token once")
            found[talking, "each token once"] = _seconds(
                computing, _cache_turns(computing, prompts), "naive"
            )
            asked = replace(workload, fresh_tokens=QUESTION_TOKENS).prompt(
                vocabulary, seed=1000 + turn
            )
            for llm in (reusing, computing):
                cache_chunks(llm.engine, asked)
                _seconds(llm, [asked], policy)
            progress(f"turn {turn} of {repeat}: the same prompt again")
            found["the same prompt again", "reuse"] = _seconds(reusing, [asked], policy)
            found["the same prompt again", "no reuse"] = _seconds(computing, [asked], policy)
            fresh = Prompt((asked.segments[-1],))
            found["the same prompt again", "its fresh tokens alone"] = _seconds(
                computing, [fresh], "full"
            )
            new = _as_documents(
                replace(workload, fresh_tokens=QUESTION_TOKENS).prompt(vocabulary, seed=2000 + turn)
            )
            progress(f"turn {turn} of {repeat}: new documents")
            found["new documents", "reuse"] = _seconds(reusing, [new], policy)
            found["new documents", "no reuse"] = _seconds(computing, [new], "full")
            if turn:
                for key, seconds in found.items():
                    taken.setdefault(key, []).append(seconds)
    medians = {key: statistics.median(seconds) for key, seconds in taken.items()}
    rows: list[Row] = [
        {
            "case": case,
            "way": way,
            "policy": policy,
            "seconds": seconds,
            "ratio_to_reuse": seconds / medians[case, "reuse"],
        }
        for (case, way), seconds in medians.items()
    ]
    return replace(subject.report(rows), columns=COLUMNS)


def conversation_prompts(
    workload: Workload, turns: int, vocabulary: int, *, seed: int
) -> list[Prompt]:
    """Make the prompts of a conversation's turns, each of which begins with the one before."""
    first = workload.prompt(vocabulary, seed)
    generator = np.random.default_rng([seed, 1])
    prompts = [first]
    for _ in range(turns - 1):
        *before, last = prompts[-1].segments
        said = generator.integers(0, vocabulary, workload.fresh_tokens).tolist()
        prompts.append(Prompt((*before, FreshSegment((*last.tokens, *said)))))
    return prompts


def _cache_turns(llm: LLM, prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return the prompts with all but each one's own turn in chunks, and cache these."""
    spoken = [prompts[0]]
    for before, prompt in pairwise(prompts):
        *chunks, last = prompt.segments
        said = len(before.segments[-1].tokens)
        spoken.append(
            Prompt(
                (
                    *chunks,
                    CachedSegment(Chunk(last.tokens[:said])),
                    FreshSegment(tuple(last.tokens[said:])),
                )
            )
        )
        cache_chunks(llm.engine, spoken[-1])
    return spoken


def _as_documents(prompt: Prompt) -> Prompt:
    """Return the prompt without the attention scores of its chunks, which a request's own documents
    do not have."""

    def strip_scores(segment: Segment) -> Segment:
        if isinstance(segment, FreshSegment):
            return segment
        return CachedSegment(replace(segment.chunk, scored=False))

    return Prompt(tuple(strip_scores(segment) for segment in prompt.segments))


def _seconds(llm: LLM, prompts: Sequence[Prompt], policy: str) -> float:
    """Return the seconds to the first tokens of all prompts, asked one after the other."""
    return sum(first_token(llm.engine, prompt, policy).seconds for prompt in prompts)
