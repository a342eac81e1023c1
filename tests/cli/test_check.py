"""kvlinker check: whether a model can be linked, how far, and else why not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner, Result

from kvlinker.cli import app
from kvlinker.engines.contract.known_models import remember_fingerprint
from kvlinker.engines.embedded.model.weights.native_products import native_products
from kvlinker.engines.embedded.model_loading import multiplies_bf16
from kvlinker.quality.bench.harness.shapes import byte_tokenizer
from kvlinker.service.audit.measured import AutoPolicy, PolicyFigures
from kvlinker.settings import load_settings
from tests.engines.contract.test_gguf import model_of, written
from tests.toy_models import BASE, HYBRIDS, LATENT, YARN_ROPE

FINGERPRINT = "0123456789abcdef" * 4


def checked(folder: Path, kind: str, *options: str, **changes: Any) -> Result:
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **changes)).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return CliRunner().invoke(app, ["check", str(folder), *options])


def test_a_model_without_rotary_embedding_and_window(tmp_path: Path) -> None:
    result = checked(tmp_path, "bloom", hidden_size=32, n_layer=2, n_head=2, vocab_size=300)
    assert result.exit_code == 1
    assert (
        "BloomForCausalLM is not supported yet: its attention has position biases (ALiBi)"
        in result.stderr
    )
    assert "report it with its config.json" in result.stderr
    assert "Traceback" not in result.output


def test_a_model_whose_context_is_bounded(tmp_path: Path) -> None:
    rope = YARN_ROPE | {"llama_4_scaling_beta": 0.1}
    result = checked(
        tmp_path, "ministral3", **(BASE | {"rope_parameters": rope, "sliding_window": None})
    )
    assert result.exit_code == 0, result.output
    assert "can be linked, in contexts of up to 512 tokens." in result.output
    assert "further on" in result.output
    assert re.search(r"A token's KV takes [\d,]+ bytes \(\w+\)\.", result.output)


def test_what_a_server_measured_of_policies_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLINKER_STATE_DIR", str(tmp_path / "state"))
    result = checked(tmp_path / "model", "llama", **BASE)
    assert "No policy was measured with it yet" in result.output
    settings = load_settings(model=str(tmp_path / "model"))
    remember_fingerprint(settings, FINGERPRINT)
    AutoPolicy(settings, FINGERPRINT, lambda policy: None).keep(
        [
            PolicyFigures(name, kl, agreement=0.93, recomputed=share, prompts=8, tokens=100)
            for name, kl, share in (
                ("row", 0.07, 0.0),
                ("row+query-5-sensitive", 0.03, 0.05),
                ("row+query-15-sensitive", 0.02, 0.15),
            )
        ]
    )
    output = CliRunner().invoke(app, ["check", settings.model]).output
    assert re.search(r"row\+query-5-sensitive +\S +0\.030 +\S +93% +\S +5\.0%", output)
    assert output.endswith(
        "With quality=high, requests that name no policy get row+query-5-sensitive.\n"
    )


def test_how_many_matrices_are_multiplied_in_8_bits(tmp_path: Path) -> None:
    result = checked(tmp_path, "llama", "--weights", "int8", **BASE)
    assert result.exit_code == 0, result.output
    said = r"\d+ of 12 matrices in 8 bits are" if native_products() else "No matrix in 8 bits is"
    assert re.search(f"{said} multiplied by", result.output)


@pytest.mark.skipif(not multiplies_bf16(load_settings()), reason="no native products")
def test_how_many_matrices_stay_the_codes_of_a_gguf_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLINKER_STATE_DIR", str(tmp_path / "state"))
    file = written(model_of(), tmp_path / "model.gguf", kind=GGMLQuantizationType.Q8_0)
    result = CliRunner().invoke(app, ["check", str(file)])
    assert result.exit_code == 0, result.output
    assert "16 matrices are multiplied by in the codes of the GGUF file." in result.output


def test_a_format_of_weights_that_there_is_not(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["check", str(tmp_path), "--weights", "int5"])
    assert result.exit_code == 2
    assert "int5" in result.stderr


def test_a_model_with_latents(tmp_path: Path) -> None:
    result = checked(tmp_path, "deepseek_v3", **(BASE | LATENT))
    assert result.exit_code == 0, result.output
    kept = {"float32": "480 bytes as latents, 1,728", "bfloat16": "240 bytes as latents, 864"}
    told = [f"takes {sizes} as keys and values ({dtype})." for dtype, sizes in kept.items()]
    assert any(each in result.output for each in told), result.output


def test_a_model_whose_layers_keep_a_state(tmp_path: Path) -> None:
    kind, changes = HYBRIDS["qwen3_5-states"]
    result = checked(tmp_path, kind, **(BASE | changes))
    assert result.exit_code == 0, result.output
    sizes = {"float32": "9,600", "bfloat16": "7,872"}
    told = (f"3 layers keep a state, which takes {size} bytes" for size in sizes.values())
    assert any(each in result.output for each in told), result.output
    assert re.search(
        r"takes [\d,]+ bytes there. With state_inputs=off, a chunk .* takes [\d,]+",
        result.output,
    )
    assert "falling back" not in result.output


def test_a_model_with_an_indexer(tmp_path: Path) -> None:
    sizes = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 8}
    result = checked(tmp_path, "deepseek_v32", **(BASE | LATENT | sizes))
    assert result.exit_code == 0, result.output
    told = [
        f"In 3 layers, indexers pick the tokens that queries see; {size} of these bytes are"
        for size in ("192", "96")
    ]
    assert any(each in result.output for each in told), result.output
