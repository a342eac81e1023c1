"""Compute, with a model as it is in transformers, what linking is to agree with."""
