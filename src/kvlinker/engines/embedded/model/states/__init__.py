"""Layers that keep a state of fixed size instead of keys and values, or in addition to them."""
