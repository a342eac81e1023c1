"""``kvlinker run``: a conversation with a model in the terminal."""
