"""The HTTP server: OpenAI's routes, context caches, metrics and access control over one ``LLM``.

Each resource has a file with its routes, request bodies and response bodies. The other files are
shared: access, errors, bodies, the choices of a request, answering and metrics; ``app`` puts all
together.
"""
