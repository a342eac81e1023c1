"""Trains soft prefaces: vectors in front of a chunk, in place of other chunks, by which its KV
becomes that of its place in a row (after KV Packet, arXiv 2604.13226, whose vectors are kept; here
nothing of them is).

One preface of a few vectors for each place is trained by distillation on questions of the shipped
data set ``facts``: documents are computed one by one, each behind the prompt's head and the preface
of its place, and the answer of the full computation is scored behind their joined KV. Everything is
transformers' own pass, with gradients.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from transformers import DynamicCache

from kvlinker.engines.contract.model_files import read_tokenizer
from kvlinker.quality.bench.harness.benchmark import Setup, benchmark
from kvlinker.quality.bench.harness.report import Report, Row, describe_machine, versions
from kvlinker.quality.evaluation.datasets.facts import LENGTHS, facts
from kvlinker.quality.evaluation.examples import Question
from kvlinker.quality.evaluation.statistics import mean_interval
from kvlinker.quality.progress import Progress, silent

COLUMNS = ("preface", "n", "kl", "ci_low", "ci_high", "agreement")

ANSWER_TOKENS = 24
"""The most tokens of an answer that are compared."""

TRAINED_ON, POOL = 1001, 80
"""The first number of the questions that prefaces are trained on, and how many there are of each
length; those that are compared come before."""

SIBLINGS = 501
"""The first number of the questions whose documents stand in front as in a row."""

RATE, WARM_STEPS, BATCH = 0.15, 10, 2
"""The highest learning rate, in standard deviations of the model's embeddings; the steps until it
is reached; and the questions of a step. Chosen by hand, by the first 30 steps."""

TEXT = (
    "Here are some notes about various places and people, which were collected over time and are"
    " kept in the archive for anyone who may want to read them later on. "
)
"""The text that a preface begins as, and is compared with."""

Layers = Sequence[tuple[Tensor, Tensor]]
Preface = Callable[[int, "Example"], Tensor | None]
"""Returns what stands in front of a document at a place: [tokens, width], or nothing."""


@dataclass(frozen=True, eq=False)
class Example:
    """A prompt of documents with the answer of the full computation."""

    head: Tensor
    """The tokens before the first document."""
    documents: Sequence[Tensor]
    question: Tensor
    answer: Tensor
    teacher: Tensor
    """The full computation's log probabilities: [answer, vocabulary]."""

    long: bool
    """True if the documents are long ones."""


class Distillation:
    """Computes prompts in pieces, with the gradients of what stands in front of documents."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._model = model.eval().requires_grad_(False)
        self._tokenizer = tokenizer
        self.embed: nn.Module = model.get_input_embeddings()

    def ids(self, text: str) -> Tensor:
        """Return the tokens of a text, without special ones."""
        tokens = self._tokenizer(text, add_special_tokens=False, return_tensors="pt")
        found: Tensor = tokens.input_ids[0]
        return found

    @torch.no_grad()
    def example(self, question: Question, *, long: bool) -> Example:
        """Answer a question by the full computation."""
        content = "".join(question.passages) + question.question
        text = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        head = self.ids(text[: text.index(question.passages[0])])
        documents = [self.ids(passage) for passage in question.passages]
        asked = self.ids(text[text.index(question.question) :])
        prompt = torch.cat([head, *documents, asked])
        answer: list[int] = []
        cache, left = DynamicCache(), prompt[None]
        while len(answer) < ANSWER_TOKENS:
            output = self._model(input_ids=left, past_key_values=cache, logits_to_keep=1)
            answer.append(int(output.logits[0, -1].argmax()))
            if answer[-1] == self._tokenizer.eos_token_id:
                break
            left = torch.tensor([answer[-1:]])
        told = torch.tensor(answer)
        whole = torch.cat([prompt, told[:-1]])[None]
        logits = self._model(input_ids=whole, logits_to_keep=len(told)).logits[0]
        return Example(head, documents, asked, told, logits.float().log_softmax(-1), long)

    def compare(self, example: Example, preface: Preface) -> tuple[Tensor, float]:
        """Return the KL divergence, in nats per token of the answer, and the agreement of the most
        likely tokens, where documents are computed behind prefaces."""
        head = self.embed(example.head)
        begun = torch.cat([example.head, example.documents[0]])
        at = len(begun)
        blocks = [self._kv(self.embed(begun), torch.arange(at), at)]
        for place, document in enumerate(example.documents[1:], 1):
            front, count = preface(place, example), len(document)
            parts = [head, *([] if front is None else [front.to(head.dtype)]), self.embed(document)]
            first = at - (0 if front is None else len(front))
            places = torch.arange(first, at + count).clamp(min=len(example.head))
            positions = torch.cat([torch.arange(len(example.head)), places])
            blocks.append(self._kv(torch.cat(parts), positions, count))
            at += count
        cache = DynamicCache()
        for layer, parts_of_layer in enumerate(zip(*blocks, strict=True)):
            keys, values = zip(*parts_of_layer, strict=True)
            cache.update(torch.cat(keys, dim=2), torch.cat(values, dim=2), layer)
        rest = torch.cat([example.question, example.answer[:-1]])
        logits = self._model(
            input_ids=rest[None],
            past_key_values=cache,
            position_ids=torch.arange(at, at + len(rest))[None],
            logits_to_keep=len(example.answer),
        ).logits[0]
        found, teacher = logits.float().log_softmax(-1), example.teacher
        same = (found.argmax(-1) == teacher.argmax(-1)).float().mean().item()
        return (teacher.exp() * (teacher - found)).sum(-1).mean(), same

    def _kv(self, embedded: Tensor, positions: Tensor, kept: int) -> Layers:
        """Return the keys and values of the last ``kept`` tokens of one pass, by layer."""
        cache = DynamicCache()
        self._model(
            inputs_embeds=embedded[None],
            position_ids=positions[None],
            past_key_values=cache,
            logits_to_keep=1,
        )
        return [(layer.keys[:, :, -kept:], layer.values[:, :, -kept:]) for layer in cache.layers]


def trained(
    distillation: Distillation,
    begun: Tensor,
    examples: Callable[[], Example],
    steps: int,
    progress: Progress = silent,
) -> Tensor:
    """Return prefaces [places, tokens, width] that were trained from ``begun`` on, by Adam."""
    prefaces = nn.Parameter(begun.float().clone())
    deviation = next(distillation.embed.parameters()).float().std().item()
    optimizer = torch.optim.Adam([prefaces])
    for step in range(steps):
        rate = min(1.0, (step + 1) / WARM_STEPS) * max(0.05, 1 - step / steps)
        optimizer.param_groups[0]["lr"] = RATE * deviation * rate
        for _ in range(BATCH):
            loss, _ = distillation.compare(examples(), by_place(prefaces))
            (loss / BATCH).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_([prefaces], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        progress(f"step {step + 1} of {steps}")
    return prefaces.detach()


def by_place(prefaces: Tensor) -> Preface:
    """Return a preface for each place, the last one for later places, too."""
    return lambda place, _: prefaces[min(place, len(prefaces)) - 1]


@benchmark("soft-prefaces")
def soft_prefaces(
    setup: Setup,
    *,
    tokens: Annotated[int, typer.Option(min=1, help="The vectors of a preface.")] = 16,
    steps: Annotated[int, typer.Option(min=1, help="The steps of training.")] = 300,
    limit: Annotated[int, typer.Option(min=2, help="The questions that are compared.")] = 24,
) -> Report:
    """Train soft prefaces by place for a model, and compare KV behind them, behind a text as long,
    behind other documents as in a row, and alone, with the full computation.

    ``kl`` is along the full computation's answer, in nats per token; ``agreement`` the share of its
    tokens that are the likeliest, too. All prompts are new to the prefaces, of the same kind.
    """
    distillation = Distillation(setup.transformer(), read_tokenizer(setup.settings))
    rows = run_soft_prefaces(
        distillation, tokens=tokens, steps=steps, limit=limit, progress=setup.progress
    )
    return Report(
        command=setup.command,
        machine=describe_machine(torch.device("cpu")),
        versions=versions(),
        settings={"model": setup.settings.model, "tokens": tokens, "steps": steps, "limit": limit},
        rows=rows,
        columns=COLUMNS,
    )


def run_soft_prefaces(
    distillation: Distillation,
    *,
    tokens: int,
    steps: int,
    limit: int,
    progress: Progress = silent,
) -> list[Row]:
    """Train, and compare on ``limit`` questions; one row for each kind of preface."""
    questions = (
        (facts(number, length), length) for number in range(1, limit + 1) for length in LENGTHS
    )
    compared = [
        distillation.example(question, long=length == max(LENGTHS))
        for question, length in list(questions)[:limit]
    ]
    words = distillation.ids(TEXT * (1 + tokens // 8))[:tokens]
    text = distillation.embed(words)
    places = len(compared[0].documents) - 1
    noise = torch.randn(places, *text.shape, generator=torch.Generator().manual_seed(0))
    begun = text + 0.01 * text.float().std() * noise
    siblings = {length: list(_siblings(distillation, length)) for length in LENGTHS}

    def row(place: int, example: Example) -> Tensor:
        own = siblings[max(LENGTHS) if example.long else min(LENGTHS)]
        first = 3 * place
        found: Tensor = distillation.embed(torch.cat(own[first : first + place]))
        return found

    pool: dict[tuple[int, int], Example] = {}
    rng = random.Random(1)

    def examples() -> Example:
        number, length = TRAINED_ON + rng.randrange(POOL), rng.choice(LENGTHS)
        if (number, length) not in pool:
            question = facts(number, length)
            pool[number, length] = distillation.example(question, long=length == max(LENGTHS))
        return pool[number, length]

    soft = trained(distillation, begun, examples, steps, progress)
    kinds: dict[str, Preface] = {
        "none": lambda place, example: None,
        f"text of {tokens} tokens": lambda place, example: text,
        "documents of others, as many as the place": row,
        f"soft, {tokens} vectors by place": by_place(soft),
    }
    return [_row(distillation, name, compared, preface) for name, preface in kinds.items()]


@torch.no_grad()
def _row(
    distillation: Distillation, name: str, compared: Sequence[Example], preface: Preface
) -> Row:
    found = [distillation.compare(example, preface) for example in compared]
    divergences = [divergence.item() for divergence, _ in found]
    low, high = mean_interval(divergences)
    return {
        "preface": name,
        "n": len(found),
        "kl": fmean(divergences),
        "ci_low": low,
        "ci_high": high,
        "agreement": fmean(same for _, same in found),
    }


def _siblings(distillation: Distillation, length: int) -> Iterator[Tensor]:
    for number in range(SIBLINGS, SIBLINGS + 4):
        for passage in facts(number, length).passages:
            yield distillation.ids(passage)
