"""Shared by all packages: plain values, errors, events, threads and the machine. No torch, no
model."""
