"""Transformers models: loading them, finding out what they are made of, and stepping into their forward pass."""
