"""Decides which requests are computed when: their states, their order, and the contents of a
step."""
