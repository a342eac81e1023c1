"""Which models of transformers can be linked: small random ones of every class, and the table."""
