"""Commands for documents: ingest files, search cached chunks, and ask about them."""
