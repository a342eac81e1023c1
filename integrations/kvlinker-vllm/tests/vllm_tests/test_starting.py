"""Where vLLM's own process does not start, users are told what it met there, in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from tests.toy_models import BASE
from transformers import AutoConfig, AutoModelForCausalLM

from kvlinker.quality.bench.harness.shapes import byte_tokenizer
from kvlinker.settings import Settings
from vllm_tests.conftest import OPTIONS

FEW_BLOCKS = OPTIONS | {"num_gpu_blocks_override": 1}
"""Options that vLLM takes, and with which its process finds no room for a prompt."""

LEARNED = {"ffn_dim": 96, "word_embed_proj_dim": 64, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with learned positions, which vLLM runs, and a worker of kvlinker's refuses."""
    folder = tmp_path_factory.mktemp("opt")
    torch.manual_seed(0)
    config = AutoConfig.for_model("opt", **(BASE | LEARNED))
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def served(model: str | Path, state: Path, options: Mapping[str, Any]) -> str:
    """What ``kvlinker serve`` says itself of an engine that does not start."""
    command = [str(Path(sys.executable).with_name("kvlinker")), "serve", "--engine", "vllm"]
    command += ["--model", str(model), "--state-dir", str(state), "--dtype", "float32"]
    command += ["--port", "0", "--vllm-options", json.dumps(options)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 1, ended.stderr[-3000:]
    (line,) = (line for line in ended.stderr.splitlines() if line.startswith("kvlinker: "))
    return line


@pytest.mark.whole
def test_what_the_engines_process_meets_is_told(vllm_settings: Settings, tmp_path: Path) -> None:
    line = served(str(vllm_settings.model), tmp_path, FEW_BLOCKS)
    assert line.startswith(f"kvlinker: vLLM cannot run '{vllm_settings.model}': ValueError: ")
    assert "No available memory for the cache blocks" in line


@pytest.mark.whole
def test_what_a_worker_refuses_is_told(learned: Path, tmp_path: Path) -> None:
    line = served(learned, tmp_path, OPTIONS)
    assert line.startswith("kvlinker: OPTForCausalLM applies no rotary embedding in vLLM")
