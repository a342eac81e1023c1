"""kvlinker inside vLLM: a KV connector that links, and an engine for kvlinker's server over vLLM's.

Only ``adapter`` and what it hands out touches vLLM; everything else here works on plain values.
Nothing imports vLLM until an engine or a connector is made.
"""
