"""kvlinker's ``Engine`` over vLLM's client: from requests to orders, from vLLM's outputs to events."""
