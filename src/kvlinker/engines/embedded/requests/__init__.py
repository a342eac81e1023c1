"""Defines the engine's requests, one kind per file, and the tokens to compute for each."""
