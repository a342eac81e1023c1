"""Training: a run that is interrupted ends with the same weights as one that is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from kvlinker_lab.training import train
from kvlinker_lab.training.conversations import Mixture
from kvlinker_lab.training.curriculum import Stage
from kvlinker_lab.training.questions import WorldSettings
from kvlinker_lab.training.tokenizer import save_tokenizer

MIXTURE = Mixture(96, WorldSettings(fillers=0))
STAGES = (
    Stage("first", MIXTURE, batch=1, steps=1),
    Stage("second", MIXTURE, batch=1, steps=2, muon_lr=(0.01, 0.001), sink_weight=0.1),
)


@pytest.mark.whole
def test_an_interrupted_run_ends_with_the_same_weights(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "CURRICULUM", STAGES)
    for run in ("whole", "parts"):
        save_tokenizer(tokenizer, tmp_path / run / "tokenizer")
    whole = train.Trainer(tmp_path / "whole", seed=0, compiled=False)
    whole.run(minutes=10, product=None)
    for _ in range(3):
        parts = train.Trainer(tmp_path / "parts", seed=0, compiled=False)
        parts.run(minutes=0, product=None)  # one step
    assert parts.progress.tokens == whole.progress.tokens > 0
    for name, weights in whole.reader.state_dict().items():
        assert torch.equal(weights, parts.reader.state_dict()[name]), name


@pytest.mark.whole
def test_the_averaged_stages_are_exported_and_can_be_gone_on_from(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "CURRICULUM", STAGES)
    monkeypatch.setattr(train, "AVERAGED", ("first", "second"))
    save_tokenizer(tokenizer, tmp_path / "run" / "tokenizer")
    train.Trainer(tmp_path / "run", seed=0, compiled=False).run(
        minutes=10, product=tmp_path / "product"
    )
    ends = [load_file(tmp_path / "run" / f"{stage.name}.safetensors") for stage in STAGES]
    exported = load_file(tmp_path / "product" / "model.safetensors")
    for name, weights in exported.items():
        assert torch.equal(weights, ((ends[0][name] + ends[1][name]) / 2).bfloat16()), name

    (tmp_path / "next").mkdir()
    following = train.Trainer(
        tmp_path / "next", seed=0, compiled=False, start=train.Start(tmp_path / "product", "second")
    )
    assert following.progress.stage == 1
    assert (tmp_path / "next" / "tokenizer" / "tokenizer.json").exists()
    for name, weights in following.reader.state_dict().items():
        assert torch.equal(weights.bfloat16(), exported[name]), name
