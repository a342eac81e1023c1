"""kvlinker's routes inside vLLM's own server, and vLLM's routes inside kvlinker's."""
