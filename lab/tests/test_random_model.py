"""Files of random weights are models in the layouts and formats of real ones."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import gguf
import numpy as np
import pytest
from typer.testing import CliRunner

from kvlinker import LLM
from kvlinker_lab import random_model
from kvlinker_lab.cli import app
from kvlinker_lab.random_model import LAYOUTS, Layout, Weights
from tests.engines.contract.test_gguf import model_of, written

SMALL = {
    "qwen2.5-3b": Layout("qwen2", 9, 256, 4, 2, 512, 64, tied=True),
    "qwen3-8b": Layout("qwen3", 9, 256, 4, 2, 512, 64, tied=False),
}


@pytest.mark.parametrize("layout", SMALL)
@pytest.mark.parametrize("weights", get_args(Weights))
def test_a_random_model_is_served(
    layout: str, weights: Weights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random_model, "LAYOUTS", SMALL)
    tokenizer = written(model_of(), tmp_path / "tokenizer.gguf")
    file = tmp_path / "random.gguf"
    arguments = [str(file), "--tokenizer", str(tokenizer), "--layout", layout]
    result = CliRunner().invoke(app, ["random-model", *arguments, "--weights", weights])
    assert result.exit_code == 0, result.output
    matrices = [each for each in gguf.GGUFReader(file).tensors if len(each.shape) > 1]
    kinds = {each.tensor_type.name for each in matrices}
    assert kinds == ({"Q4_K", "Q6_K"} if weights == "Q4_K_M" else {weights})
    for each in matrices:
        values = gguf.dequantize(each.data, each.tensor_type)
        assert np.std(values) * each.shape[0] ** 0.5 == pytest.approx(1, abs=0.15)
        assert abs(np.mean(values)) < 0.15 * np.std(values)
    with LLM(str(file), state_dir=tmp_path / "state") as llm:  # its self-test has passed
        answer = llm.completion("one two", max_tokens=3, temperature=0, ignore_eos=True)
        assert answer.usage.output_tokens == 3


def test_real_sizes() -> None:
    """The files' sizes on the hub are 1.93 and 5.03 GB in Q4_K_M, with tables of tokens of 6 MB."""
    for layout, gigabytes in (("qwen2.5-3b", 1.93), ("qwen3-8b", 5.03)):
        written_bytes = 0
        for name, shape in LAYOUTS[layout].tensors(151_936):
            kind = random_model._kind(name, shape, "Q4_K_M", LAYOUTS[layout])
            rows = 1 if len(shape) == 1 else shape[0]
            written_bytes += rows * random_model._row_bytes(kind, shape[-1])
        assert written_bytes / 1e9 == pytest.approx(gigabytes, abs=0.01)


@pytest.mark.parametrize("option", [("--layout", "llama-1t"), ("--weights", "Q9")])
def test_unknown_names(option: tuple[str, str], tmp_path: Path) -> None:
    arguments = ["random-model", str(tmp_path / "a.gguf"), "--tokenizer", str(tmp_path / "b.gguf")]
    result = CliRunner().invoke(app, [*arguments, *option])
    assert result.exit_code == 2
    assert option[1] in result.output
