"""What kvlinker asks of vLLM for a request, and what the connector's sides tell each other of it."""
