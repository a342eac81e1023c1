"""Small real models, as they are and in transformers, and the rounding of their own passes, by
which errors are judged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvlinker.base.types.chunks import Chunk
from kvlinker.engines.embedded.model.loaded import LoadedModel
from kvlinker.engines.embedded.model_loading import load_model
from kvlinker.prompting.segments import CachedSegment, FreshSegment, Prompt, Segment
from kvlinker.quality.evaluation.datasets.facts import facts
from kvlinker.settings import load_settings
from tests.engines.embedded.conftest import Bench, Outcome
from tests.engines.embedded.execution.test_oracle import computed_layers

FOLDER = Path(__file__).parents[2] / ".models"

SMOLLM2 = "smollm2-135m-instruct"
GEMMA = "gemma-3-270m"
QWEN = "qwen2.5-coder-0.5b-instruct"

LIKELIEST = 20
"""The number of tokens, the most likely ones, whose log probabilities are compared at each place
of a text."""

PLACES = 64
"""The number of places over which rounding is measured."""

MORE_THAN_ROUNDING = 2.0
"""The factor by which an error may exceed the rounding of the model's own pass, which was measured
on other tokens; errors were 0.5 to 1.4 times that."""


def model_path(name: str) -> str:
    """The path of a model's folder, or of its GGUF file by ``name.gguf``; skips the test without
    it."""
    path = FOLDER / name
    if not path.exists():
        pytest.skip(f"{name} is not there: `make models` puts it together")
    return str(path)


class RealModel:
    """A model with its weights in bfloat16, or in fp32, as the engine computes it and as
    transformers does."""

    def __init__(self, name: str, state: Path) -> None:
        """Checks that a model has passed are remembered in ``state``."""
        self.path, self.gguf = model_path(name), model_path(f"{name}.gguf")
        self._state = state

    @cached_property
    def loaded(self) -> LoadedModel:
        """The model as the engine computes it in bfloat16, by compiled steps."""
        return load_model(load_settings(model=self.path, weights="bf16", state_dir=self._state))

    def loaded_in_fp32(self) -> LoadedModel:
        """The model as the engine computes it in fp32, by its modules."""
        return load_model(load_settings(model=self.path, dtype="float32", state_dir=self._state))

    def plain(self, dtype: torch.dtype) -> Any:
        """The model as transformers computes it, with the plainest attention."""
        return AutoModelForCausalLM.from_pretrained(
            self.path, dtype=dtype, attn_implementation="eager"
        )

    @cached_property
    def exact(self) -> Any:
        """The model in fp32."""
        return self.plain(torch.float32)

    @cached_property
    def text(self) -> tuple[int, ...]:
        """The tokens of a text, enough for all prompts."""
        passages = (each for number in range(8) for each in facts(number, 6).passages)
        encoded = self.loaded.tokenizer("".join(passages), add_special_tokens=False)
        return tuple(encoded.input_ids)

    @cached_property
    def rounding(self) -> float:
        """The error of the model's own pass in bfloat16 from that in fp32, in nats: the root mean
        square over the most likely tokens at PLACES places."""
        tokens = self.text[:400]
        expected = distributions(self.exact, tokens, PLACES)
        found = distributions(self.plain(torch.bfloat16), tokens, PLACES)
        chosen = expected.topk(LIKELIEST).indices
        return root_mean_square((found - expected).gather(1, chosen).numpy())

    def prompt(self, *lengths: int, header: int = 5, middle: int = 3, fresh: int = 23) -> Prompt:
        """A prompt of the text, whose chunks have these lengths, with fresh tokens before, between
        and behind them."""
        left = iter(self.text)

        def take(count: int) -> tuple[int, ...]:
            return tuple(next(left) for _ in range(count))

        segments: list[Segment] = [FreshSegment(take(header))]
        for length in lengths:
            segments += [CachedSegment(Chunk(take(length))), FreshSegment(take(middle))]
        return Prompt((*segments, FreshSegment(take(fresh))))


@torch.inference_mode()
def distributions(model: Any, tokens: Any, last: int) -> Tensor:
    """The log probabilities [last, vocabulary] of each next token at the last places of a text, by
    the model's own pass."""
    ids = torch.tensor([list(tokens)])
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=last).logits[0]
    return torch.log_softmax(logits.double(), -1)


def root_mean_square(differences: Sequence[float] | NDArray[np.float64]) -> float:
    return float(np.sqrt(np.mean(np.square(differences))))


def answers(
    engine: Bench, asked: Iterable[tuple[Prompt, str, str]], **sampling: Any
) -> list[Outcome]:
    """The answers to prompts, each with its policy and tenant, computed together. The store has the
    KV of their chunks."""
    options = sampling | {"explains": True, "logprobs": LIKELIEST}
    with engine.held() as held:
        outcomes = [
            engine.submit(prompt, policy, tenant=tenant, **options)[0]
            for prompt, policy, tenant in asked
        ]
        held.wait_until_ready(len(outcomes))
    return [outcome.wait() for outcome in outcomes]


def computed_masks(engine: Bench, outcome: Outcome) -> list[NDArray[np.bool_]]:
    """The cached tokens that each layer computed for an answer: masks [tokens]."""
    assert outcome.finished is not None, outcome.failed
    return list(computed_layers(outcome.finished.explanation, len(engine.loaded.layers)))


def error(outcome: Outcome, expected: Tensor) -> float:
    """How far the log probabilities of an answer's most likely tokens are from those expected
    [steps, vocabulary], in nats: the root mean square. The request asked for ``logprobs``."""
    assert outcome.failed is None, outcome.failed
    entries = [entry for delta in outcome.deltas for entry in delta.logprobs]
    found = [[each.logprob for each in entry.top] for entry in entries]
    theirs = [
        row[[each.token_id for each in entry.top]].tolist()
        for row, entry in zip(expected, entries, strict=True)
    ]
    return root_mean_square(np.array(found) - np.array(theirs))


@pytest.fixture(scope="session")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("real-models")


@pytest.fixture(scope="module", params=[SMOLLM2, GEMMA, QWEN])
def real(request: pytest.FixtureRequest, state: Path) -> RealModel:
    """Each of the models."""
    return RealModel(request.param, state)
