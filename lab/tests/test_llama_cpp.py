"""A GGUF file means the same to kvlinker as to llama.cpp: its tokens, log probabilities and greedy
answers."""

from __future__ import annotations

import ctypes
import random
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers.normalizers import NFC
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from kvlinker import LLM
from kvlinker.engines.contract.gguf_unpacking import with_folder
from kvlinker.settings import Settings, load_settings
from kvlinker_lab.peers.llama_cpp_model import llama_context, llama_model
from tests.engines.contract.test_gguf import FAMILIES, model_of, written

llama_cpp = pytest.importorskip("llama_cpp")

MODELS = Path(__file__).parents[2] / ".models"
FILES = sorted(MODELS.glob("*.gguf"))
pytestmark = [
    pytest.mark.whole,
    pytest.mark.skipif(not FILES, reason="make models brings the files"),
]

TEXTS = 2000
ANSWER_TOKENS = 64

CLOSE = 0.25
"""Logits of llama.cpp this near to one another may change places: its kernels round inputs to 8
bits."""

PIECES = (
    *("the", "The", " a", " don't", " it's", " WE'LL", "naïve", "Straße", " ąęź", "Ελλάδα", " мир"),
    *(
        "こんにちは",
        "世界",
        "안녕",
        "שלום",
        "مرحبا",
        "हिन्दी",
        "ไทย",
        "👩‍👩‍👧",
        "🇫🇷",
        "e\u0301",
        "ﬁ",
    ),
    *(" 1", "42", "2026-11-28", "3.14159", "1,000,000", "0x1F", "½", "²", "Ⅷ", "٣"),
    *(" ", "  ", "    ", "\t", "\n", "\n\n", "\r\n", "\u00a0", "\u200b", "\u3000", "\ufeff"),
    *("def f(x):\n    return x", "</div>", "=>", "!=", "::", "```", "...", "—", "“", "”", "$", "%"),
    *("_", "'", '"', "\\", "/", "@", "#", "~", "^", "[", "]", "{", "}", "camelCase", "snake_case"),
)


def texts() -> list[str]:
    """Texts of all kinds, the same each time."""
    chosen = random.Random(0)
    return [
        "".join(chosen.choices(PIECES, k=chosen.randint(1, 30)))
        if number % 2
        else " ".join(chosen.choices(PIECES, k=chosen.randint(1, 30)))
        for number in range(TEXTS)
    ]


@pytest.fixture(scope="module", params=FILES, ids=lambda path: path.stem)
def settings(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Settings:
    return load_settings(
        model=str(request.param), state_dir=tmp_path_factory.mktemp("state"), disk_space=0
    )


@pytest.fixture(scope="module")
def model(settings: Settings) -> Iterator[Any]:
    """The file in llama.cpp."""
    with llama_model(Path(settings.model)) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def llm(settings: Settings) -> Iterator[LLM]:
    """The file in kvlinker."""
    with LLM.from_settings(settings) as running:
        yield running


def tokens_of(model: Any, text: str) -> list[int]:
    """What llama.cpp makes of a text as a prompt."""
    content = text.encode()
    room = len(content) + 8
    found = (ctypes.c_int32 * room)()
    vocabulary = llama_cpp.llama_model_get_vocab(model)
    count = llama_cpp.llama_tokenize(vocabulary, content, len(content), found, room, True, True)
    return list(found[:count])


def test_texts_have_the_same_tokens(settings: Settings, model: Any) -> None:
    """llama.cpp does not compose characters, as Qwen's own tokenizer does, and so its files'."""
    tokenizer = AutoTokenizer.from_pretrained(with_folder(settings).model)
    composes = isinstance(tokenizer.backend_tokenizer.normalizer, NFC)
    given = [unicodedata.normalize("NFC", text) if composes else text for text in texts()]
    differ = [text for text in given if tokenizer(text).input_ids != tokens_of(model, text)]
    assert differ == []


def exact_logits(settings: Settings, ids: list[int]) -> Any:
    """What the file's weights make of tokens in fp32, read and computed by transformers."""
    config = AutoConfig.from_pretrained(with_folder(settings).model)
    config.dtype = torch.float32
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    read = load_gguf_checkpoint(settings.model, return_tensors=True, model_to_load=model)
    exact = type(model).from_pretrained(None, config=config, state_dict=read["tensors"])
    with torch.inference_mode():
        return exact.eval()(torch.tensor([ids])).logits[0].numpy()


def logprobs_of(logits: Any, ids: list[int]) -> Any:
    """The log probabilities of all tokens but the first."""
    wide = logits[:-1].astype(np.float64)
    return wide[np.arange(len(ids) - 1), ids[1:]] - np.logaddexp.reduce(wide, axis=1)


def test_log_probabilities_are_as_near_to_the_exact_ones(
    settings: Settings, model: Any, llm: LLM
) -> None:
    """Both engines round inputs to 8 bits; ours is not further from fp32 than llama.cpp."""
    text = Path(__file__).parents[2].joinpath("docs", "models.md").read_text()[:1500]
    ids = tokens_of(model, text)[:256]
    exact = exact_logits(settings, ids)
    with llama_context(model, exact.shape[1], 1, len(ids), 2) as context:
        theirs = context.append(np.array([ids]), 0, last=len(ids)).copy()
    ours = np.array(llm.score(ids).logprobs)
    told = logprobs_of(exact, ids)
    error, their_error = (
        np.sqrt(np.mean((found - told) ** 2)) for found in (ours, logprobs_of(theirs, ids))
    )
    print(f"{settings.served_name}: {error:.4f} nats, llama.cpp {their_error:.4f}")
    assert error < 1.25 * their_error


@pytest.mark.parametrize("family", FAMILIES)
def test_each_architecture_computes_the_same(family: str, tmp_path: Path) -> None:
    """With random weights in fp32, which both read from one file; heads as wide as llama.cpp wants
    them in all of these."""
    model = model_of(family, head_dim=16)
    file = written(model, tmp_path / "model.gguf")
    ids = list(range(3, 60))
    options = {"state_dir": tmp_path / "state", "disk_space": 0, "dtype": "float32"}
    with LLM.from_settings(load_settings(model=str(file), **options)) as llm:
        ours = np.array(llm.score(ids).logprobs)
    with (
        llama_model(file) as theirs,
        llama_context(theirs, model.config.vocab_size, 1, len(ids), 2) as context,
    ):
        told = logprobs_of(context.append(np.array([ids]), 0, last=len(ids)).copy(), ids)
    assert np.abs(ours - told).max() < 0.02  # its keys and values are in fp16


def test_greedy_answers_are_the_same(model: Any, llm: LLM) -> None:
    """Up to where two logits are close."""
    text = "Three rivers of Europe, and where they end:\n1. The Danube,"
    ids = tokens_of(model, text)
    ours = llm.completion(ids, max_tokens=ANSWER_TOKENS, temperature=0, ignore_eos=True).token_ids
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    with llama_context(model, vocabulary, 1, len(ids) + ANSWER_TOKENS, 2) as context:
        logits = context.append(np.array([ids]), 0)[0]
        for number, token in enumerate(ours):
            if token != logits.argmax():
                assert logits.max() - logits[token] < CLOSE, (number, logits.max(), logits[token])
            logits = context.append(np.array([[token]]), len(ids) + number)[0]
