"""The messages of kvlinker's server, vLLM's scheduler and vLLM's workers to each other."""
