"""Small tokenizers of every kind that kvlinker meets, trained on the spot from a few sentences."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

SENTENCES = (
    "Hello world, this is a small text about a cat and a dog.",
    "The cat sat on the mat. It was fine! Was it? Yes.",
    "numbers 1 2 3 and more words: alpha, beta, gamma",
    "# Title\n\nA paragraph of words.\n\n- item one\n- item two\n",
    "user assistant system question answer document the a of and to in is",
)
BYTE_FALLBACK = [f"<0x{byte:02X}>" for byte in range(256)]


@cache
def byte_level(*, bos: bool = True, add_prefix_space: bool = False) -> PreTrainedTokenizerFast:
    """Byte-level BPE as in GPT-2 and Llama-3; with ``bos`` it puts ``<s>`` before every prompt."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    backend.decoder = decoders.ByteLevel()
    specials = ["<pad>", "<|end|>", "<|start|>", "<s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(SENTENCES * 4, trainer)
    backend.add_tokens([AddedToken("<think>", special=False)])
    return _wrapped(backend, bos="<s>" if bos else None, eos="<|end|>", pad_token="<pad>")


@cache
def metaspace(kind: str = "first") -> PreTrainedTokenizerFast:
    """SentencePiece-style BPE as in Llama-2. ``kind`` is what puts a space before the first word.

    ``first`` and ``always``: a Metaspace pre-tokenizer with that scheme; ``prepend``: a normalizer;
    ``never``: nothing.
    """
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    trainer = trainers.BpeTrainer(
        vocab_size=520, special_tokens=["<unk>", "<s>", "</s>", *BYTE_FALLBACK], show_progress=False
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    backend.train_from_iterator(SENTENCES * 4, trainer)
    state = json.loads(backend.to_str())
    state["added_tokens"] = [
        token for token in state["added_tokens"] if token["content"] not in BYTE_FALLBACK
    ]
    backend = Tokenizer.from_str(json.dumps(state))
    if kind == "prepend":
        backend.pre_tokenizer = None
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind, split=False)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return _wrapped(backend, bos="<s>", eos="</s>", unk_token="<unk>")


@cache
def word_level() -> PreTrainedTokenizerFast:
    """One id per word; its special tokens are words of the vocabulary too, ``§`` among them."""
    specials = ["<unk>", "<s>", "</s>", "§"]
    words = sorted({word for sentence in SENTENCES for word in sentence.split()})
    vocab = {word: i for i, word in enumerate([*specials, *words])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _wrapped(
        backend, bos="<s>", eos="</s>", unk_token="<unk>", additional_special_tokens=["§"]
    )


@cache
def unigram() -> PreTrainedTokenizerFast:
    """SentencePiece-style unigrams with its normalisation; special tokens are pieces, too."""
    pieces = sorted({character for sentence in SENTENCES for character in sentence} | set("<>/▁"))
    specials = ["<unk>", "<s>", "</s>"]
    backend = Tokenizer(
        models.Unigram([*((name, 0.0) for name in specials), *((one, -3.0) for one in pieces)], 0)
    )
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return _wrapped(backend, bos="<s>", eos="</s>", unk_token="<unk>")


def _wrapped(
    backend: Tokenizer, *, bos: str | None, eos: str, **names: Any
) -> PreTrainedTokenizerFast:
    if bos is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
        )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token=eos, **names)
