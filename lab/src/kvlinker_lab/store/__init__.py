"""Measures the chunk store: the parts of ``kvlinker-lab store``."""
