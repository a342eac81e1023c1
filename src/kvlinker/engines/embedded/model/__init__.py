"""Loads transformers models, finds out their structure, and intercepts their forward pass."""
