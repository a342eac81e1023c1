"""The model that is trained computes what the exported one computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvlinker.settings.settings import BUNDLED_MODEL
from kvlinker_lab.training.hybrid import HybridReader
from kvlinker_lab.training.initialisation import initial_reader
from kvlinker_lab.training.model import Reader
from kvlinker_lab.training.tokenizer import save_tokenizer


@pytest.fixture(scope="module")
def reader(tokenizer: Tokenizer) -> Reader:
    reader = initial_reader(tokenizer, seed=0)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in reader.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return reader


def test_exported_model_agrees(reader: Reader, tokenizer: Tokenizer, tmp_path: Path) -> None:
    save_tokenizer(tokenizer, tmp_path / "tokenizer")
    reader.export(tmp_path / "tokenizer", tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype=torch.float32, attn_implementation="eager"
    )
    assert AutoTokenizer.from_pretrained(tmp_path / "model").bos_token_id == 0

    ids = torch.randint(6, 4096, (2, 150), generator=torch.Generator().manual_seed(0))
    ids[:, 0] = 0
    probes = torch.tensor([20, 140])
    positions = torch.tensor([[0, 17, 80, 149], [3, 70, 110, 148]])
    with torch.no_grad():
        expected = model(ids, output_attentions=True)
        hidden, missed = reader.hidden(ids, probes, positions)
        logits = reader.logits(hidden)
    wanted = expected.logits.gather(1, positions[:, :, None].expand(-1, -1, 4096))
    assert (logits - wanted).std() < 0.03 * wanted.std()  # bfloat16 against float32

    for layer in range(1, 5):
        attention = expected.attentions[layer][:, :, probes, 0]
        torch.testing.assert_close(torch.exp(-missed[layer - 1]), attention, atol=0.03, rtol=0.1)
    last = (
        expected.attentions[5][[0, 0, 1, 1], :, [0, 149, 3, 148], 0]
        .unflatten(0, (2, 2))
        .transpose(1, 2)
    )
    found = torch.exp(-reader.hidden(ids, torch.tensor([0, 149]), positions)[1][-1])
    torch.testing.assert_close(found[:, :, 0], last[:, :, 0], atol=0.03, rtol=0.1)


def test_initial_weights_follow_from_the_seed(tokenizer: Tokenizer) -> None:
    first, again, other = (initial_reader(tokenizer, seed).state_dict() for seed in (0, 0, 1))
    assert all(first[name].equal(again[name]) for name in first)
    assert not first["lm_head.weight"].equal(other["lm_head.weight"])


def test_a_hybrid_is_exported_as_it_was_trained(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """It begins with the reader's weights, and one of its six layers attends."""
    save_tokenizer(tokenizer, tmp_path / "tokenizer")
    hybrid = HybridReader(BUNDLED_MODEL, seed=0)
    hybrid.export(tmp_path / "tokenizer", tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert model.config.layer_types.count("full_attention") == 1
    assert AutoTokenizer.from_pretrained(tmp_path / "model").bos_token_id == 0
    ids = torch.randint(6, 4096, (2, 90), generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([[0, 17, 89], [3, 70, 88]])
    with torch.no_grad():
        expected = model(ids).logits.gather(1, positions[:, :, None].expand(-1, -1, 4096))
        hidden, distances = hybrid.hidden(ids, torch.tensor([0]), positions)
        logits = hybrid.logits(hidden)
    assert (logits - expected).std() < 0.05 * expected.std()  # bfloat16 against float32
    loss, mean = hybrid.sink_loss(distances, 0.0)
    assert 0 < float(loss) == pytest.approx(mean)
