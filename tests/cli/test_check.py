"""kvlinker check on models that cannot be linked: a line that says why."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from kvlinker.cli import app
from kvlinker.research.bench.harness.shapes import byte_tokenizer


def test_a_model_whose_context_window_is_not_known(tmp_path: Path) -> None:
    config = AutoConfig.for_model("bloom", hidden_size=32, n_layer=2, n_head=2, vocab_size=300)
    assert not hasattr(config, "max_position_embeddings")
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    result = CliRunner().invoke(app, ["check", str(tmp_path)])
    assert result.exit_code == 1
    assert "BloomForCausalLM has no max_position_embeddings" in result.stderr
    assert "Traceback" not in result.output
