"""Shared by benchmarks: registration as a command, the subject, timed rounds and medians, and the
report."""
