"""How callers reach the library: the HTTP server, the same routes inside vLLM's own server, and the
HTTP client."""
