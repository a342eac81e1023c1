"""The embedded engine: continuous batching of runs over unmodified transformers models."""
