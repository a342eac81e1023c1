"""Defines what callers ask the engine for, one kind per file, and the tokens to compute for
each."""
