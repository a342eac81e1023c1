"""Weights of linear layers: in the order and in the bits in which a processor multiplies by them
fastest."""
