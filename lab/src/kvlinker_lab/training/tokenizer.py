"""Trains the reader's tokenizer: byte-level BPE in which every world word is a single token.

Text is cut so that a chunk that ends with a line break can be tokenised alone or in context with
the same result: runs of line breaks are words of their own. Run as ``python -m
kvlinker_lab.training.tokenizer FOLDER`` to train it and write it in the Hugging Face format.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from kvlinker_lab.training import prose
from kvlinker_lab.training import vocabulary as words
from kvlinker_lab.training.relations import BRIDGES, RELATIONS
from kvlinker_lab.training.tasks import FORMATS

VOCABULARY_SIZE = 4096
"""The most tokens of the vocabulary."""

SPECIAL_TOKENS = ("<s>", "<|end|>", "<pad>", "<|system|>", "<|user|>", "<|assistant|>")
BOS, END, PAD, SYSTEM, USER, ASSISTANT = range(len(SPECIAL_TOKENS))

_WORDS = r" ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\n+|[^\S\n]+(?![^\s])|[^\S\n]+"

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def _corpus() -> Iterator[str]:
    """Yield text for the merges: library prose, the sentences around facts, invented names.

    The world's own words are left out: they have reserved tokens and need no merges.
    """
    yield from prose.library_paragraphs()
    rng = random.Random(0)
    for _ in range(4000):
        yield prose.grammar_sentence(rng)
    for _ in range(60):
        for relation in RELATIONS.values():
            for template in (*relation.statements, *relation.questions):
                yield template.replace("{s}", "It").replace(" {v}", "")
        for bridge in BRIDGES:
            for template in bridge.questions:
                yield template.replace("{s}", "It")
        for template in FORMATS:
            yield template.replace("{v}", "it")
        yield "Question: What is the surname of the older one, or the younger one?\n\n"
        yield (
            "Examples:\nAnswer like this:\nUse this format:\nContinued. Further notes. More on"
            " this.\n\n"
        )
    for _ in range(2000):
        name = words.invented_name(rng)
        yield f"{name} {name}"


def train_tokenizer() -> Tokenizer:
    """Learn merges, then fill the vocabulary up with the world words that have no token yet."""
    reserved = [*words.WORLD_WORDS, *(" " + w for w in words.WORLD_WORDS)]
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    state: dict[str, Any] = json.loads(tokenizer.to_str())
    model = state["model"]
    merges: list[list[str]] = model["merges"]
    by_id = sorted(model["vocab"], key=model["vocab"].__getitem__)
    base = by_id[: len(by_id) - len(merges)]  # special tokens and bytes
    spelled = [w.replace(" ", "Ġ") for w in reserved]
    # Merges are in order of use: keep as many as leave room for the words they do not produce.
    kept = len(merges)
    while True:
        produced = ["".join(pair) for pair in merges[:kept]]
        tokens = list(dict.fromkeys([*base, *produced, *spelled]))
        if len(tokens) <= VOCABULARY_SIZE:
            break
        kept -= len(tokens) - VOCABULARY_SIZE
    model["merges"] = merges[:kept]
    model["vocab"] = {token: i for i, token in enumerate(tokens)}
    model["ignore_merges"] = True  # a word that is in the vocabulary is that token
    return Tokenizer.from_str(json.dumps(state))


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write ``tokenizer.json``, its configuration, and the chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    configuration = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[BOS],
        "eos_token": SPECIAL_TOKENS[END],
        "pad_token": SPECIAL_TOKENS[PAD],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    }
    text = json.dumps(configuration, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


if __name__ == "__main__":
    save_tokenizer(train_tokenizer(), Path(sys.argv[1]))
