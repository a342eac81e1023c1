"""The catalog of context caches: one SQLite file per state directory."""
