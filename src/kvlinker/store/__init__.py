"""Chunk caches: their KV in tiers, and the catalog of the context caches that hold them."""
