"""Makes prompts of typed content for all callers."""

from kvlinker.service.reading.reader import (
    ContentReader,
    PreparedRequest,
    ReadOptions,
    ReadPrompt,
    RequestTools,
)

__all__ = ["ContentReader", "PreparedRequest", "ReadOptions", "ReadPrompt", "RequestTools"]
