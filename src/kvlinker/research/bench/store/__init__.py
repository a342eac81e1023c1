"""Measures the chunk store: the parts of ``bench store``."""
