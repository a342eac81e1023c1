"""Decides which requests are computed when: their states, their order, and what a step holds."""
