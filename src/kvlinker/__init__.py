"""A linker for KV caches."""
