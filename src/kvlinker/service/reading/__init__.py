"""Makes prompts of typed content for all callers."""

from kvlinker.service.reading.reader import ContentReader, ReadOptions, ReadPrompt

__all__ = ["ContentReader", "ReadOptions", "ReadPrompt"]
