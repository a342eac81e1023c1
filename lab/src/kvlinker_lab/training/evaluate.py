"""Measures the reader's exact match on worlds of people it never met.

Run as ``python -m kvlinker_lab.training.evaluate FOLDER``. Each prompt is a fresh conversation in
the chat format: passages tokenised one by one, one question, and the model's greedy answer, which
must equal the expected one up to and including the end of the turn.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from kvlinker_lab.training.prose import held_out_paragraphs
from kvlinker_lab.training.questions import WORLD_KINDS, Kind, WorldSettings
from kvlinker_lab.training.tokenizer import ASSISTANT, BOS, END, PAD, USER
from kvlinker_lab.training.worlds import build_world

_WORDS_PER_TOKEN = 1 / 1.45
"""The words of a token: 1.45 tokens a word, as measured with the reader's tokenizer."""


class HeldOutPrompt(NamedTuple):
    """Holds the token ids of a conversation up to the answer, and of the answer with its end token.

    `passages` are the numbers of tokens of the passages, which stand behind the first two tokens.
    """

    ids: list[int]
    answer: list[int]
    kind: Kind
    passages: list[int]


def held_out_prompts(
    tokenizer: PreTrainedTokenizerBase,
    kind: Kind,
    count: int,
    tokens: tuple[int, int],
    settings: WorldSettings,
    seed: int = 0,
) -> list[HeldOutPrompt]:
    """Make `count` prompts of one kind whose lengths lie within `tokens`, from held-out worlds."""
    rng = random.Random(f"held out/{seed}/{kind}")
    prompts: list[HeldOutPrompt] = []
    while len(prompts) < count:
        budget = int(rng.uniform(*tokens) * _WORDS_PER_TOKEN)
        world = build_world(rng, replace(settings.about(kind), held_out=True), budget)
        questions = [q for q in world.questions if q.kind == kind and not q.opening]
        if not questions:
            continue
        question = rng.choice(questions)
        chunks = [
            tokenizer.encode(passage + "\n\n", add_special_tokens=False)
            for passage in world.passages
        ]
        ids = [BOS, USER, *(token for chunk in chunks for token in chunk)]
        ids += tokenizer.encode("Question: " + question.text, add_special_tokens=False)
        ids += [END, ASSISTANT]
        if tokens[0] <= len(ids) <= tokens[1]:
            answer = tokenizer.encode(question.answer, add_special_tokens=False)
            prompts.append(
                HeldOutPrompt(ids, [*answer, END], kind, [len(chunk) for chunk in chunks])
            )
    return prompts


@torch.inference_mode()
def exact_matches(
    model: PreTrainedModel, prompts: Sequence[HeldOutPrompt], alone: bool = False, batch: int = 8
) -> int:
    """Count the greedy answers that are right: all their tokens must be the most likely ones.

    With `alone`, passages do not attend to each other, as if their KV had been computed apart.
    """
    right = 0
    for start in range(0, len(prompts), batch):
        part = prompts[start : start + batch]
        longest = max(len(p.ids) + len(p.answer) for p in part)
        ids = torch.full((len(part), longest), PAD)
        for row, prompt in zip(ids, part, strict=True):
            row[: len(prompt.ids) + len(prompt.answer)] = torch.tensor(prompt.ids + prompt.answer)
        if alone:
            visible = torch.stack([_passages_apart(prompt, longest) for prompt in part])[:, None]
            mask = torch.zeros(visible.shape, dtype=model.dtype).masked_fill(
                ~visible, torch.finfo(model.dtype).min
            )
            best = model(ids, attention_mask=mask).logits.argmax(-1)
        else:
            best = model(ids).logits.argmax(-1)
        for row, prompt in zip(best, part, strict=True):
            first = len(prompt.ids) - 1
            right += row[first : first + len(prompt.answer)].tolist() == prompt.answer
    return right


def _passages_apart(prompt: HeldOutPrompt, length: int) -> torch.Tensor:
    """Say which token [length, 1] sees which [1, length]: passages see the first two tokens and
    themselves."""
    passage = torch.zeros(length, dtype=torch.long)
    inside = torch.repeat_interleave(
        torch.arange(1, len(prompt.passages) + 1), torch.tensor(prompt.passages)
    )
    passage[2 : 2 + len(inside)] = inside
    asker, seen = passage[:, None], passage[None]
    return torch.ones(length, length).tril().bool() & ((asker == 0) | (seen == 0) | (asker == seen))


@torch.inference_mode()
def first_token_attention(model: PreTrainedModel, prompts: Sequence[HeldOutPrompt]) -> list[float]:
    """Return the mean attention on the first token per layer, over heads and the prompts' last 32
    tokens."""
    model.set_attn_implementation("eager")
    shares = [
        torch.stack(
            [
                layer[0, :, -32:, 0].float().mean()
                for layer in model(torch.tensor([prompt.ids]), output_attentions=True).attentions
            ]
        )
        for prompt in prompts
    ]
    mean: list[float] = torch.stack(shares).mean(0).tolist()
    return mean


@torch.inference_mode()
def prose_loss(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tokens: int = 512, count: int = 20
) -> float:
    """Return the nats per token on prose that training never read, in `count` sequences of `tokens`
    tokens."""
    ids: list[int] = []
    for paragraph in held_out_paragraphs():
        ids += tokenizer.encode(paragraph + "\n\n", add_special_tokens=False)
    starts = range(0, min(count * (tokens - 1), len(ids) - tokens), tokens - 1)
    rows = torch.tensor([[BOS, *ids[start : start + tokens - 1]] for start in starts])
    losses = [
        torch.nn.functional.cross_entropy(model(row[None]).logits[0, :-1].float(), row[1:]).item()
        for row in rows
    ]
    return sum(losses) / len(losses)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--count", type=int, default=200, help="prompts per kind")
    parser.add_argument("--tokens", type=int, nargs=2, default=(500, 900), metavar=("MIN", "MAX"))
    parser.add_argument("--kinds", nargs="+", choices=WORLD_KINDS, default=WORLD_KINDS)
    parser.add_argument(
        "--invented",
        type=float,
        default=WorldSettings.invented_share,
        help="share of invented names",
    )
    parser.add_argument("--float32", action="store_true", help="compute in float32, not bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    dtype = torch.float32 if arguments.float32 else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype).eval()
    settings = WorldSettings(invented_share=arguments.invented)
    low, high = arguments.tokens
    print(f"{arguments.model}: {arguments.count} prompts per kind, {low} to {high} tokens, {dtype}")
    prompts: list[HeldOutPrompt] = []
    right: list[int] = []
    print(f"{'kind':10} exact  passages read alone")
    for kind in arguments.kinds:
        prompts = held_out_prompts(
            tokenizer, kind, arguments.count, (low, high), settings, arguments.seed
        )
        right.append(exact_matches(model, prompts))
        alone = exact_matches(model, prompts, alone=True)
        print(
            f"{kind:10} {100 * right[-1] / len(prompts):5.1f}% {100 * alone / len(prompts):5.1f}%",
            flush=True,
        )
    print(f"{'all':10} {100 * sum(right) / (arguments.count * len(right)):5.1f}%")
    print(f"held-out prose: {prose_loss(model, tokenizer):.2f} nats per token")
    sinks = first_token_attention(model, prompts[:20])
    print("attention on the first token by layer:", " ".join(f"{s:.2f}" for s in sinks))


if __name__ == "__main__":
    main()
