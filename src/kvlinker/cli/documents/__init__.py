"""Commands for documents: ingest files, search what is cached, and ask about it."""
