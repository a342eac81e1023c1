"""Measures speed, memory and quality: all competitors in one run, medians and ratios, with machine
and versions.

A function with the decorator ``benchmark`` in a file of this package is a command of ``kvlinker
bench``.
"""
