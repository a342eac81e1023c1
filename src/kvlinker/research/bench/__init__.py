"""Benchmarks: all competitors in one run, medians and ratios, machine and versions beside them."""
