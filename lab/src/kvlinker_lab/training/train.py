"""Trains the reader; run as ``python -m kvlinker_lab.training.train --work FOLDER --minutes 60``.

Data, initialisation and order follow from the seed. A run resumes from the checkpoint in its
folder, also in the middle of a stage, and reads the same data as an uninterrupted one.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from kvlinker_lab.training.conversations import ANSWER, ANSWERS, LANGUAGE, SequenceMaker
from kvlinker_lab.training.curriculum import AVERAGED, CURRICULUM, Stage
from kvlinker_lab.training.hybrid import HybridReader
from kvlinker_lab.training.initialisation import initial_reader
from kvlinker_lab.training.model import Reader
from kvlinker_lab.training.tokenizer import END, PAD, save_tokenizer, train_tokenizer

_LEARNED_SHARE = 0.25  # of a sequence's positions: its answers, and a sample of its other text
"""The share of positions that are learned: answers first, then a sample of the others."""

_PROBES = 12  # positions per step at which the attention on the first token is measured
"""The positions of a batch whose attention on token 0 is trained."""


@dataclass
class RunState:
    """The state of a run, which is saved with the checkpoint."""

    stage: int = 0
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    accuracies: dict[str, float] = field(default_factory=dict)
    """Running accuracy of each kind's answer tokens, without the ends of turns."""

    @property
    def accuracy(self) -> float:
        """The mean accuracy over kinds."""
        return sum(self.accuracies.values()) / max(1, len(self.accuracies))


class Losses(NamedTuple):
    """Holds the parts of a step's loss, and the accuracy of its answers."""

    total: Tensor
    answer: float
    language: float
    guidance: float
    """Attention on the first token, the mean over layers >= 1; or, of a hybrid, how far its layers
    are from the reader's."""
    accuracies: dict[str, float]
    """Accuracy of each kind in the batch."""


class Start(NamedTuple):
    """Says where a run begins that goes on from a trained model: its folder, the first stage to
    run, and whether a hybrid learns from it."""

    model: Path
    stage: str
    hybrid: bool = False


def optimizers(reader: Reader | HybridReader) -> list[torch.optim.Optimizer]:
    """Make the optimizers: Muon for the matrices of the layers, AdamW for embeddings, head and
    norms."""
    matrices = [p for p in reader.model.layers.parameters() if p.dim() == 2]
    chosen = {id(p) for p in matrices}
    others = [p for p in reader.parameters() if id(p) not in chosen]
    return [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1, momentum=0.95),
        torch.optim.AdamW(others, lr=3e-3, weight_decay=0.0, betas=(0.9, 0.97)),
    ]


def batches(stage: Stage, tokenizer: Tokenizer, seed: int, start: int) -> Iterator[Tensor]:
    """Yield batches [2, batch, length] of ids and roles, from step `start` on."""
    maker = SequenceMaker(tokenizer, stage.mixture)
    for step in range(start, stage.steps):
        rng = random.Random(f"{seed}/{stage.name}/{step}")
        sequences = [maker.make(rng) for _ in range(stage.batch)]
        yield torch.tensor([[s.ids for s in sequences], [s.roles for s in sequences]])


def losses(
    reader: Reader | HybridReader, stage: Stage, batch: Tensor, generator: torch.Generator
) -> Losses:
    """Compute the loss of a batch: answers, a sample of the language modelling, and the sinks."""
    ids, roles = batch
    length = ids.shape[1]
    probes = torch.randint(8, length, (_PROBES,), generator=generator)
    roles = roles[:, 1:]
    urgency = torch.rand(roles.shape, generator=generator) + roles.clamp(
        max=ANSWER
    )  # ANSWER > LANGUAGE > IGNORED
    chosen = urgency.topk(int(length * _LEARNED_SHARE)).indices.sort().values
    hidden, aside = reader.hidden(ids, probes, chosen)
    roles, targets = roles.gather(1, chosen), ids.gather(1, chosen + 1)

    answers, languages = roles >= ANSWER, roles == LANGUAGE
    logits = reader.logits(torch.cat((hidden[answers], hidden[languages])))
    count = int(answers.sum())
    answer = functional.cross_entropy(logits[:count], targets[answers])
    language = functional.cross_entropy(logits[count:], targets[languages])
    guidance, figure = reader.sink_loss(aside, stage.sink_weight)
    total = answer + stage.language_weight * language + guidance

    right = (logits[:count].argmax(-1) == targets[answers]).float()
    kinds = roles[answers].masked_fill(targets[answers] == END, ANSWER)
    accuracies: dict[str, float] = {}
    for kind, role in ANSWERS.items():
        if (kinds == role).any():
            accuracies[kind] = right[kinds == role].mean().item()
    return Losses(total, answer.item(), language.item(), figure, accuracies)


def set_learning_rates(optimizers: list[torch.optim.Optimizer], stage: Stage, step: int) -> None:
    """Return the learning rate, linear in the step from the stage's first rate to its last, after a
    short warm-up."""
    first, last = stage.muon_lr
    rate = first + (last - first) * step / max(1, stage.steps - 1)
    rate *= min(1.0, (step + 1) / 20)
    for optimizer, value in zip(optimizers, (rate, rate / first * stage.adam_lr), strict=True):
        for group in optimizer.param_groups:
            group["lr"] = value


class Trainer:
    """Runs the training: model, optimizers and progress, with their checkpoint."""

    def __init__(self, work: Path, seed: int, compiled: bool, start: Start | None = None) -> None:
        self.work = work
        self.seed = seed
        self.tokenizer = self._tokenizer(start)
        self.reader: Reader | HybridReader = (
            HybridReader(start.model, seed)
            if start is not None and start.hybrid
            else initial_reader(self.tokenizer, seed)
        )
        self.optimizers = optimizers(self.reader)
        self.progress = RunState()
        if (work / "checkpoint.pt").exists():
            self._load()
        elif start is not None:
            if not start.hybrid:
                self.reader.load_state_dict(load_file(start.model / "model.safetensors"))
            self.progress.stage = [stage.name for stage in CURRICULUM].index(start.stage)
        if compiled:
            for layer in self.reader.model.layers:
                layer.compile(dynamic=False)

    def _tokenizer(self, start: Start | None) -> Tokenizer:
        folder = self.work / "tokenizer"
        if not (folder / "tokenizer.json").exists():
            trained = (
                train_tokenizer()
                if start is None
                else Tokenizer.from_file(str(start.model / "tokenizer.json"))
            )
            save_tokenizer(trained, folder)
        return Tokenizer.from_file(str(folder / "tokenizer.json"))

    def _load(self) -> None:
        state: dict[str, Any] = torch.load(self.work / "checkpoint.pt", weights_only=True)
        self.reader.load_state_dict(state["reader"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.progress = RunState(**state["progress"])

    def save(self, product: Path | None) -> None:
        """Write the checkpoint, and the model for users if `product` is given."""
        state = {
            "reader": self.reader.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "progress": vars(self.progress),
        }
        unfinished = self.work / "checkpoint.tmp"
        torch.save(state, unfinished)
        unfinished.replace(self.work / "checkpoint.pt")
        if product is not None:
            self.reader.export(self.work / "tokenizer", product)

    def run(self, minutes: float, product: Path | None) -> None:
        """Train until the curriculum or the time is over; save every two minutes."""
        started = saved = time.monotonic()
        while self.progress.stage < len(CURRICULUM):
            stage = CURRICULUM[self.progress.stage]
            torch.compiler.reset()  # each stage has its own shapes
            for batch in batches(stage, self.tokenizer, self.seed, self.progress.step):
                before = time.monotonic()
                self._step(stage, batch)
                now = time.monotonic()
                self.progress.seconds += now - before
                if now - saved > 120:
                    self.save(product)
                    saved = now
                if now - started > 60 * minutes:
                    self.save(product)
                    return
                if stage.until is not None and self.progress.accuracy > stage.until:
                    break
            if stage.name in AVERAGED:
                save_file(self.reader.state_dict(), self._weights_of(stage.name))
            self.progress.stage += 1
            self.progress.step = 0
            self.progress.accuracies = {}
            self.save(product)
        self._average(product)

    def _weights_of(self, stage: str) -> Path:
        return self.work / f"{stage}.safetensors"

    def _average(self, product: Path | None) -> None:
        """Export the mean of the weights that the averaged stages ended with, as far as they were
        run."""
        ends = [load_file(path) for stage in AVERAGED if (path := self._weights_of(stage)).exists()]
        if product is not None and ends:
            mean = {name: torch.stack([end[name] for end in ends]).mean(0) for name in ends[0]}
            self.reader.load_state_dict(mean)
            self.reader.export(self.work / "tokenizer", product)

    def _step(self, stage: Stage, batch: Tensor) -> None:
        progress = self.progress
        before = time.monotonic()
        generator = torch.Generator().manual_seed(hash((self.seed, progress.stage, progress.step)))
        set_learning_rates(self.optimizers, stage, progress.step)
        step_losses = losses(self.reader, stage, batch, generator)
        step_losses.total.backward()  # type: ignore[no-untyped-call]
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        progress.step += 1
        progress.tokens += int((batch[0] != PAD).sum())
        for kind, accuracy in step_losses.accuracies.items():
            running = progress.accuracies.get(kind, accuracy)
            progress.accuracies[kind] = running + 0.05 * (accuracy - running)
        if progress.step % 20 == 0:
            seconds = time.monotonic() - before
            accuracies = " ".join(
                f"{kind} {value:.2f}" for kind, value in sorted(progress.accuracies.items())
            )
            left = (stage.steps - progress.step) * seconds / 60
            print(
                f"{stage.name} {progress.step}/{stage.steps}"
                f" answer {step_losses.answer:.3f} language {step_losses.language:.3f}"
                f" guidance {step_losses.guidance:.2f} | {accuracies}"
                f" | {progress.tokens / 1e6:.2f}M tokens, {progress.seconds / 60:.1f} min,"
                f" {batch[0].numel() / seconds:.0f} tokens/s, stage ends in {left:.1f} min",
                flush=True,
            )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--export", type=Path, help="folder of the model for users")
    parser.add_argument("--minutes", type=float, default=60.0, help="wall-clock budget")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eager", action="store_true", help="do not compile the layers")
    parser.add_argument(
        "--from",
        dest="model",
        type=Path,
        help="go on from this exported model, with new optimizers",
    )
    parser.add_argument(
        "--stage",
        choices=[stage.name for stage in CURRICULUM],
        default="wide",
        help="where --from does",
    )
    parser.add_argument(
        "--hybrid",
        action="store_true",
        help="with --from, each time: train a hybrid that learns from this model",
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.work.mkdir(parents=True, exist_ok=True)
    start = (
        None
        if arguments.model is None
        else Start(arguments.model, arguments.stage, arguments.hybrid)
    )
    trainer = Trainer(arguments.work, arguments.seed, not arguments.eager, start)
    trainer.run(arguments.minutes, arguments.export)


if __name__ == "__main__":
    main()
