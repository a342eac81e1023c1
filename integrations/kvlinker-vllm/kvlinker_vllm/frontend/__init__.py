"""kvlinker's ``Engine`` over vLLM's client: from requests to transfer plans, from vLLM's outputs to
events."""
