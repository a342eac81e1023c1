"""Computes one step: runs of many requests, in one forward pass over the KV pool."""
