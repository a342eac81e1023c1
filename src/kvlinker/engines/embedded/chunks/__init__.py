"""Loads or computes the chunks of requests, and keeps variants of them."""
