"""Keeps the KV that requests computed: in slots of a pool, and, as long as there is room, for later
requests."""
