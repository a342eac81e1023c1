"""Makes prompts of typed content for all callers."""

from kvlinker.service.reading.prompts import ReadDefaults, ReadOptions, ReadPrompt
from kvlinker.service.reading.reader import ContentReader

__all__ = ["ContentReader", "ReadDefaults", "ReadOptions", "ReadPrompt"]
