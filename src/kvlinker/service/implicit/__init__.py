"""Makes chunks of texts without ids: marked ones, documents, and repeated ones."""
