"""The HTTP server: OpenAI's routes, context caches, metrics and access control over one ``LLM``."""

from kvlinker.server.app import create_app

__all__ = ["create_app"]
