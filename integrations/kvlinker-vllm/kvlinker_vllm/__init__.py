"""kvlinker inside vLLM: a KV connector that links, and an engine for kvlinker's server over vLLM's.

Only ``adapter`` and its results touch vLLM; everything else here works on plain values. Nothing
imports vLLM until an engine or a connector is made. Loggers are named below ``kvlinker``, whose
handlers write them.
"""
