"""Benchmarks, evaluations and figures; only the command line imports them."""
