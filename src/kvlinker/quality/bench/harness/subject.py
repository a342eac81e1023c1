"""Holds the model that is measured, and runs it with a store of its own in a temporary folder."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from kvlinker.base.errors import InvalidRequestError
from kvlinker.quality.bench.harness.report import Report, Row, describe_machine, versions
from kvlinker.settings import load_settings

if TYPE_CHECKING:
    from kvlinker.engines.embedded.model.loaded import LoadedModel
    from kvlinker.llm import LLM

MEMORY = 8 << 30
"""Bytes that the tier with the chunks has room for."""
TIERS = ("host", "disk", "redis", "object")

UNMEASURED: Mapping[str, Any] = MappingProxyType(
    {
        "catalog_url": None,
        "tiers": {},
        "builders": (),
        "tenant_quota_bytes": None,
        "tenant_quota_caches": None,
        "tenant_quota_pinned_bytes": None,
        "implicit": "marked",
        "implicit_policy": None,
        "keep_answers": "off",
        "embedding_model": None,
        "max_answer_tokens": None,
        "slo_ttft": None,
        "audit": 0.0,
        "audit_tokens": None,
        "audit_log": None,
        "quality_target": None,
        "require_certificate": False,
    }
)
"""Settings of a service that say nothing about a model and a policy, as measurements have them:
those of the environment are for the servers that run beside, whose catalog stays as it is."""


@dataclass(frozen=True)
class MeasuredModel:
    """The model that is measured."""

    name: str
    """The shape's or model's name."""
    command: str
    """The command line that reproduces the run."""
    loaded: LoadedModel
    options: dict[str, Any]
    """Further settings that the report lists."""

    @contextmanager
    def llm(
        self, *, kv_slots: int | None = None, tier: str = "host", **options: Any
    ) -> Iterator[LLM]:
        """Run the model with a fresh engine and store; ``options`` are settings.

        With another tier than ``host``, nothing is kept in host memory; ``redis`` needs a
        ``redis_url``, and ``object`` is a folder. Raises InvalidRequestError for an unknown tier,
        and for ``redis`` without its URL.
        """
        from kvlinker.llm import LLM

        if tier not in TIERS:
            raise InvalidRequestError(
                f"Unknown tier {tier!r}; known are {', '.join(TIERS)}.", param="tier"
            )
        with tempfile.TemporaryDirectory(prefix="kvlinker-bench-") as folder:
            # What was asked before must not change what is measured now, and neither must other
            # servers.
            fixed: dict[str, Any] = {
                "max_variants": 0,
                "prefix_cache": "off",
                "object_space": 0,
            }
            if tier == "host":
                fixed["host_memory"] = MEMORY
            else:
                fixed["host_memory"] = 0
            if tier in ("disk", "object"):
                fixed[f"{tier}_space"] = MEMORY
            if tier != "redis":
                options["redis_url"] = ""
            else:
                fixed["redis_prefix"] = f"kvlinker-bench-{secrets.token_hex(4)}"
            if tier == "object":
                fixed["object_url"] = f"file://{folder}/objects"
            if tier in ("redis", "object"):
                fixed["disk_space"] = 0
            settings = load_settings(state_dir=Path(folder), kv_slots=kv_slots, **fixed | options)
            unmeasured = {name: UNMEASURED[name] for name in UNMEASURED.keys() - options.keys()}
            settings = settings.model_copy(update=unmeasured)
            if tier == "redis" and settings.redis_url is None:
                raise InvalidRequestError(
                    "The tier redis needs the URL of a server: give --redis-url.", param="tier"
                )
            with LLM.from_model(self.loaded, settings) as llm:
                yield llm

    def report(self, rows: list[Row], **machine: Any) -> Report:
        """Make a report of rows; ``machine`` is what else is known of the machine."""
        return Report(
            command=self.command,
            machine=describe_machine(self.loaded.device) | machine,
            versions=versions(),
            settings={"model": self.name, "dtype": str(self.loaded.dtype).removeprefix("torch.")}
            | self.options,
            rows=rows,
        )
