"""Folders with embedding models that are made on the spot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

SYNONYMS = (
    ("car", "automobile", "vehicle"),
    ("doctor", "physician"),
    ("house", "home", "dwelling"),
    ("fish", "trout"),
)
"""Words that mean the same to ``synonyms``."""

LONGEST = 64
"""The tokens of a text that ``encoder`` reads."""


def encoder(folder: Path) -> Path:
    """Save a tiny random encoder of transformers."""
    import torch
    from transformers import BertConfig, BertModel

    from tests.toy_tokenizers import byte_level

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(byte_level()),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=LONGEST,
    )
    BertModel(config).save_pretrained(folder)
    byte_level().save_pretrained(folder)
    return folder


def sentence_model(
    folder: Path, *, pooling: str = "mean", normalized: bool = False, **options: Any
) -> Path:
    """Save such an encoder as a model of sentence-transformers."""
    library = pytest.importorskip("sentence_transformers")
    from sentence_transformers.base.modules import Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    transformer = Transformer(str(encoder(folder.with_name(f"{folder.name}-encoder"))))
    modules = [transformer, Pooling(32, pooling_mode=pooling)]
    model = library.SentenceTransformer(
        modules=[*modules, Normalize()] if normalized else modules, device="cpu", **options
    )
    model.save(str(folder), create_model_card=False)
    return folder


def synonyms(folder: Path) -> Path:
    """Save a model in which a text means the words that it has, and ``SYNONYMS`` the same."""
    library = pytest.importorskip("sentence_transformers")
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    words = [word for group in SYNONYMS for word in group]
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(["[UNK]", *words])}, unk_token="[UNK]")
    )
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    meanings = np.zeros((1 + len(words), len(SYNONYMS)), np.float32)
    for meaning, group in enumerate(SYNONYMS):
        for word in group:
            meanings[1 + words.index(word), meaning] = 1
    static = StaticEmbedding(tokenizer, embedding_weights=meanings)
    library.SentenceTransformer(modules=[static], device="cpu").save(
        str(folder), create_model_card=False
    )
    return folder
