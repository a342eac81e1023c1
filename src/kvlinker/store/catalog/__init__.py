"""Keeps the catalog of context caches: one SQLite file per state directory."""
