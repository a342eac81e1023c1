"""Measures speed, memory and quality: all competitors in one run, medians and ratios, machine and
versions beside them.

A function with the decorator ``benchmark`` in a file of this package is a command of ``kvlinker
bench``.
"""
