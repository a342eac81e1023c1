"""Measures servers under load, certifies policies, and recommends tiers.

For researchers, it has the papers' figures, comparisons with peers, long runs, measurements of
parts, and the training of the model in the box.

A function with the decorator ``benchmark`` in a file of this package is a command of
``kvlinker-lab``.
"""
