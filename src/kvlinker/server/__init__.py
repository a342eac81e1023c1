"""The HTTP server: OpenAI's routes, context caches, metrics and access control over one ``LLM``."""
