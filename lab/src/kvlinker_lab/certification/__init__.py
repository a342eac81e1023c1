"""Certifies a policy with a model: its answers on data sets and about the store's own chunks."""
