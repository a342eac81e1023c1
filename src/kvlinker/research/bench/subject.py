"""The model and engine that a benchmark measures, with a store of its own in a temporary folder."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvlinker.config import Settings, load_settings
from kvlinker.embedded.model.loading import LoadedModel, load_model
from kvlinker.engine.model_files import choose_device, choose_dtype
from kvlinker.errors import InvalidRequestError
from kvlinker.llm import LLM
from kvlinker.research.bench.machine import describe_machine, versions
from kvlinker.research.bench.report import Report, Row
from kvlinker.research.bench.shapes import random_model

MEMORY = 8 << 30
TIERS = ("host", "disk", "redis", "object")


@dataclass(frozen=True)
class Subject:
    """What is measured: ``name`` is the shape's or model's; ``command`` reproduces the run."""

    name: str
    command: str
    loaded: LoadedModel
    options: dict[str, Any]

    @contextmanager
    def llm(self, *, kv_slots: int | None = None, tier: str = "host", **options: Any) -> Iterator[LLM]:
        """A fresh engine and store. With another tier than ``host``, nothing is kept in host memory; ``redis`` needs a
        ``redis_url``, and ``object`` is a folder."""
        if tier not in TIERS:
            raise InvalidRequestError(f"Unknown tier {tier!r}; known are {', '.join(TIERS)}.", param="tier")
        with tempfile.TemporaryDirectory(prefix="kvlinker-bench-") as folder:
            # What was asked before must not change what is measured now, and neither must other servers.
            fixed: dict[str, Any] = {"max_variants": 0, "redis_space": 0, "object_space": 0}
            if tier == "host":
                fixed["host_memory"] = MEMORY
            else:
                fixed |= {"host_memory": 0, f"{tier}_space": MEMORY}
            if tier == "redis":
                fixed["redis_prefix"] = f"kvlinker-bench-{secrets.token_hex(4)}"
            if tier == "object":
                fixed["object_url"] = f"file://{folder}/objects"
            if tier in ("redis", "object"):
                fixed["disk_space"] = 0
            settings = load_settings(state_dir=Path(folder), kv_slots=kv_slots, **fixed | options)
            if tier == "redis" and settings.redis_url is None:
                raise InvalidRequestError("The tier redis needs the URL of a server: give --redis-url.", param="tier")
            with LLM.from_model(self.loaded, settings) as llm:
                yield llm

    def report(self, rows: list[Row], **machine: Any) -> Report:
        return Report(
            command=self.command,
            machine=describe_machine(self.loaded.device) | machine,
            versions=versions(),
            settings={"model": self.name, "dtype": str(self.loaded.dtype).removeprefix("torch.")} | self.options,
            rows=rows,
        )


def make_subject(settings: Settings, *, shape: str | None, command: str, **options: Any) -> Subject:
    """Random weights of the named shape, or without one the model that ``settings`` name."""
    if shape is None:
        return Subject(settings.served_name, command, load_model(settings), options)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    device = choose_device(settings.device)
    loaded = random_model(shape, dtype=choose_dtype(settings.dtype, device), device=device)
    return Subject(shape, command, loaded, options)
