"""The body of /status."""

from __future__ import annotations

from pydantic import Field

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


class RunningRequest(ResponseBody):
    """A request that has been answered for ``seconds``, with the tokens of its prompt and those of
    all its choices so far."""

    tenant: str
    policy: str
    seconds: float
    prompt_tokens: int
    output_tokens: int


class RecentRequest(ResponseBody):
    """A request that has ended (``at``, in Unix seconds): its tokens by how they were computed;
    those of ``fresh`` that ``implicit = "auto"`` would have found cached; and those that were left
    to compute when the client left. ``ttft_ms`` is null if there was no token, and
    ``tokens_per_second``, behind the first one, if there was but one."""

    at: int
    tenant: str = ""
    model: str
    policy: str
    cached: int
    recomputed: int
    fresh: int
    reusable: int
    uncomputed: int
    output_tokens: int
    ttft_ms: float | None
    tokens_per_second: float | None = None


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
    """The server's figures: sums over all tenants, and the ``running`` and the ``recent`` requests
    of the caller's, an admin's of all. ``started_at`` is in Unix seconds.

    ``parameters`` of the model are 0 where they are not known; ``memory_bytes`` are the process's.

    ``reusable_tokens`` of prompts were computed, but would have been cached with ``implicit =
    "auto"``.

    ``kv_bytes_per_token`` and ``kv_bytes_per_chunk`` are the sizes of chunks as computed, for each
    token and in addition; ``disk_codec`` is how they are written to disk. ``steps`` says how steps
    of few tokens are computed: ``compiled``, or the model's modules, and why.
    """

    model: str
    parameters: int = 0
    memory_bytes: int = 0
    max_model_len: int
    policy: str
    started_at: int
    requests: RequestCounts
    kv_slots: SlotCounts
    prompt_tokens: PromptTokenCounts
    reusable_tokens: int = 0
    output_tokens: int
    prefill_tokens_per_second: float | None
    kv_bytes_per_token: int
    kv_bytes_per_chunk: int
    disk_codec: str
    steps: str = "unknown"
    tiers: list[TierStatus]
    running: list[RunningRequest] = Field(default=[])
    recent: list[RecentRequest] = Field(default=[])
