"""Writes the trained reader in the Hugging Face format; called by `train`."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from training.model import Reader
from training.tokenizer import BOS, END, PAD


def export(reader: Reader, tokenizer: Path, target: Path) -> None:
    """Puts model, configuration and tokenizer files into `target`, each file in one move."""
    config = LlamaConfig(**reader.settings.hugging_face())
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.load_state_dict(reader.state_dict())
    model.generation_config = GenerationConfig(bos_token_id=BOS, eos_token_id=END, pad_token_id=PAD, do_sample=False)
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".reader-") as folder:
        model.save_pretrained(folder)
        for path in sorted(tokenizer.iterdir()):
            (Path(folder) / path.name).write_bytes(path.read_bytes())
        for path in sorted(Path(folder).iterdir()):
            path.chmod(0o644)
            path.replace(target / path.name)
