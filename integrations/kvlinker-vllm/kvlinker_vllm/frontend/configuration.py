"""Makes vLLM's configuration from kvlinker's settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from kvlinker.base.errors import InvalidRequestError, ModelLoadError
from kvlinker.engines.contract.contract import STEP_TOKENS
from kvlinker.engines.contract.model_files import choose_device, choose_dtype
from kvlinker.engines.contract.model_place import check_model
from kvlinker.settings import Settings
from kvlinker_vllm.frontend.grammars import GUIDANCE
from kvlinker_vllm.options import ConnectorOptions
from kvlinker_vllm.plugin import NAME

MOST_LOGPROBS = 1000
"""The most log probabilities of a token that kvlinker asks for: those of the examiner."""

CPU_MEMORY_SHARE = 0.4
"""The share of all memory that vLLM may take without a GPU; its default, 0.92, is more than most
machines have free."""

CONNECTOR_SETTINGS = ("host_memory", "disk_codec", "chunk_scores", "native")
"""The settings, besides the state directory, that the connector follows in vLLM's processes. These
read variables and the file themselves, but know no options."""

_OWN = "kvlinker sets it itself"
RESERVED_OPTIONS: Mapping[str, str] = {
    "model": _OWN,
    "dtype": _OWN,
    "kv_transfer_config": _OWN,
    "kv_offloading_size": "it puts another connector in the place of kvlinker's, whose own tiers"
    " keep KV",
}
"""The options of vLLM's that may not be given, and why."""


def configure(settings: Settings) -> Any:
    """Return vLLM's configuration to run ``settings.model`` with kvlinker's connector.

    Raises InvalidRequestError for options that vLLM does not know or kvlinker does not link with,
    and ModelLoadError.
    """
    from vllm.config import StructuredOutputsConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    from kvlinker_vllm.adapter import require_linkable, require_tested_version

    options = dict(settings.vllm_options)
    connector = ConnectorOptions.pop_from(options)
    require_tested_version(allow_untested=connector.allow_untested)
    for name, reason in RESERVED_OPTIONS.items():
        if name in options:
            raise InvalidRequestError(f"vllm_options may not set {name!r}: {reason}.", param=name)
    defaults: dict[str, Any] = {
        "max_model_len": settings.max_model_len,
        "max_num_batched_tokens": settings.max_step_tokens or STEP_TOKENS,
        "max_num_seqs": settings.max_running,
        "trust_remote_code": settings.trust_remote_code,
        "max_logprobs": MOST_LOGPROBS,
    }
    if settings.prefix_cache == "off":
        defaults["enable_prefix_caching"] = False
    if not torch.cuda.is_available():
        defaults["gpu_memory_utilization"] = CPU_MEMORY_SHARE
    check_model(settings)
    try:
        structured = StructuredOutputsConfig(
            **{"backend": GUIDANCE, **(options.pop("structured_outputs_config", None) or {})}
        )
        arguments = AsyncEngineArgs(
            model=settings.model,
            dtype=_dtype(settings, options),
            kv_transfer_config={
                "kv_connector": NAME,
                "kv_role": "kv_both",
                "kv_connector_module_path": "kvlinker_vllm.connector",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": connector.model_dump()
                | {
                    "state_dir": str(settings.state_dir),
                    **{name: getattr(settings, name) for name in CONNECTOR_SETTINGS},
                },
            },
            structured_outputs_config=structured,
            **(defaults | options),
        )
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(
            f"vllm_options {json.dumps(settings.vllm_options)}: {error}", param="vllm_options"
        ) from error
    try:
        config = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
    except Exception as error:  # vLLM raises whatever it meets
        raise ModelLoadError(
            f"vLLM cannot run {settings.model!r}: {' '.join(str(error).split())}"
        ) from error
    require_linkable(config)
    return config


def shared_options(settings: Settings, engines: int) -> dict[str, Any]:
    """Return the ``vllm_options`` with which ``engines`` engines fit on one machine. Engines
    without a GPU have equal parts of the memory of a single one."""
    if torch.cuda.is_available():
        return settings.vllm_options
    return {"gpu_memory_utilization": CPU_MEMORY_SHARE / engines} | settings.vllm_options


def _dtype(settings: Settings, options: Mapping[str, Any]) -> str:
    """Return the dtype for vLLM: what the embedded engine would choose, but vLLM's own choice for a
    quantised model, whose kernels take only some."""
    from vllm.transformers_utils.config import get_config

    if settings.dtype == "auto":
        try:
            config = get_config(
                settings.model, settings.trust_remote_code, revision=options.get("revision")
            )
        except Exception as error:  # vLLM raises whatever it meets
            raise ModelLoadError(
                f"vLLM cannot read the configuration of {settings.model!r}: {error}"
            ) from error
        if options.get("quantization") or getattr(config, "quantization_config", None):
            return "auto"
    return str(choose_dtype(settings.dtype, choose_device("auto"))).removeprefix("torch.")
