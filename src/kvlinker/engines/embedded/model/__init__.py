"""Loads transformers models, finds out what they are made of, and steps into their forward pass."""
