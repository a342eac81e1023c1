"""The body of /status."""

from __future__ import annotations

from kvlinker.doors.http.fields.bodies import ResponseBody


class RequestCounts(ResponseBody):
    """Requests that run and wait now, and that ended since the start."""

    running: int
    waiting: int
    finished: int


class SlotCounts(ResponseBody):
    """Slots of the KV pool; one slot holds one token."""

    used: int
    total: int


class PromptTokenCounts(ResponseBody):
    """Prompt tokens since the start, by how they were computed."""

    cached: int
    recomputed: int
    fresh: int


class TierStatus(ResponseBody):
    """A tier's fill level and measured bandwidth; null if nothing was measured yet. Servers that
    report the same ``place`` share the tier; null for memory."""

    name: str
    used_bytes: int
    budget_bytes: int
    chunks: int
    bytes_per_second: float | None
    place: str | None


class ServerStatus(ResponseBody):
    """The server's figures: sums over all tenants. ``started_at`` is in Unix seconds.

    ``kv_bytes_per_token`` and ``kv_bytes_per_chunk`` are the sizes of chunks as computed, for each
    token and in addition; ``disk_codec`` is how they are written to disk. ``steps`` says how steps
    of few tokens are computed: ``compiled``, or the model's modules, and why.
    """

    model: str
    max_model_len: int
    policy: str
    started_at: int
    requests: RequestCounts
    kv_slots: SlotCounts
    prompt_tokens: PromptTokenCounts
    output_tokens: int
    prefill_tokens_per_second: float | None
    kv_bytes_per_token: int
    kv_bytes_per_chunk: int
    disk_codec: str
    steps: str = "unknown"
    tiers: list[TierStatus]
