"""Lets transformers make models and tokenizers without the numbers and copies that are not read."""

from __future__ import annotations

import copyreg
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from tokenizers import Tokenizer
from torch import nn
from transformers.initialization import no_init_weights


@contextmanager
def parameters_without_memory() -> Iterator[None]:
    """Let parameters of the modules that are made in the block have no memory, nor numbers. Their
    buffers have: to compute those without memory, as transformers does, PyTorch would import SymPy
    and more, which takes half a second."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        on_meta = None if param is None else nn.Parameter(param.to("meta"), requires_grad=False)
        register(module, name, on_meta)

    with patch.object(nn.Module, "register_parameter", register_on_meta), no_init_weights():
        yield


@contextmanager
def without_copies() -> Iterator[None]:
    """Let what is a deep copy of a tokenizer be the tokenizer itself in the block: transformers
    copies the one that it has just read or is given, which takes two seconds for Gemma's 262,144
    tokens, and a hundred megabytes."""
    copyreg.pickle(Tokenizer, lambda _: "the same")
    try:
        yield
    finally:
        copyreg.dispatch_table.pop(Tokenizer, None)
