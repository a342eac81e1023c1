"""``kvlinker ingest``: files become context caches ahead of time, in this process or through a running server."""

from kvlinker.cli.ingest.command import ingest

__all__ = ["ingest"]
