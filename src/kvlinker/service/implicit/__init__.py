"""Makes chunks of texts that nobody named by id: marked ones, documents, and those that come
again."""
