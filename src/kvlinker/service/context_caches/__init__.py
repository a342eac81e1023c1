"""Context caches as users hold them: created, found, changed and deleted; their texts read and
searched."""

from kvlinker.service.context_caches.caches import CachesUsage, ContextCaches
from kvlinker.service.context_caches.creation import Metadata
from kvlinker.service.context_caches.texts import ChunkTexts

__all__ = ["CachesUsage", "ChunkTexts", "ContextCaches", "Metadata"]
