"""Plain values that the whole project shares, the client included; nothing here imports torch."""
