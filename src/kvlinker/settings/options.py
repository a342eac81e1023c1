"""Names the settings as keyword arguments, with the types in which each may be given: for editors
and type checkers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

from kvlinker.base.types.chunks import Eviction, GenerationContext
from kvlinker.settings.settings import WeightFormat

Size = int | str
"""Bytes, or a size with a unit, such as ``4GiB``."""


class Options(TypedDict, total=False):
    """The keyword arguments of ``LLM``: all fields of ``Settings`` except the model; ``Settings``
    documents them. None means the default."""

    served_model_name: str | None
    strict: bool | None
    strict_model: bool | None
    engine: Literal["embedded", "vllm"] | None
    vllm_options: Mapping[str, Any] | None
    on_engine_failure: Literal["exit", "restart"] | None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None
    weights: WeightFormat | None
    device: str | None
    trust_remote_code: bool | None
    chat_template: str | None
    system_prompt: str | None
    generation_config: Literal["auto", "off"] | None
    embedding_model: str | None
    max_answer_tokens: int | None
    max_calls: int | None
    policy: str | None
    quality: Literal["high", "balanced", "fast"] | None
    generation_context: GenerationContext | str | None
    chunk_scores: bool | None
    state_inputs: bool | None
    max_variants: int | None
    implicit: Literal["structure", "auto", "marked", "off"] | None
    implicit_ahead: Literal["on", "off"] | None
    implicit_policy: str | None
    implicit_ttl: float | None
    keep_answers: Literal["off", "answer"] | None
    tool_wait: float | None
    implicit_caches: int | None
    max_model_len: int | None
    kv_slots: int | None
    prefix_cache: Literal["on", "off"] | None
    max_step_tokens: int | None
    max_running: int | None
    max_waiting: int | None
    slo_tpot: float | None
    slo_ttft: float | None
    threads: int | None
    native: Literal["auto", "build", "off"] | None
    state_dir: str | Path | None
    catalog_url: str | None
    device_memory: Size | None
    host_memory: Size | None
    disk_space: Size | None
    disk_codec: str | None
    eviction: Eviction | None
    redis_url: str | None
    redis_codec: str | None
    redis_prefix: str | None
    object_url: str | None
    object_space: Size | None
    object_codec: str | None
    tiers: Mapping[str, Mapping[str, Any]] | None
    tenant_quota_bytes: Size | None
    tenant_quota_caches: int | None
    tenant_quota_pinned_bytes: Size | None
    encryption_key: str | None
    search: Literal["auto", "on", "off"] | None
    role: Literal["both", "build", "serve"] | None
    builders: str | Sequence[str] | None
    build_tokens: int | None
    audit: float | str | None
    audit_tokens: int | None
    audit_log: str | Path | None
    audit_log_text: bool | None
    quality_target: float | str | None
    quality_policies: str | Sequence[str] | None
    require_certificate: bool | None
    quality_per_tenant: bool | None
    host: str | None
    port: int | None
    allowed_hosts: str | Sequence[str] | None
    cors_origins: str | Sequence[str] | None
    request_timeout: float | None
    drain_timeout: float | None
    log_level: Literal["debug", "info", "warning", "error"] | None
    log_format: Literal["text", "json"] | None
    api_keys: str | Sequence[str] | None
    admin_keys: str | Sequence[str] | None
    response_ttl: float | None
    tenant_quotas: Mapping[str, Mapping[str, Any]] | None
