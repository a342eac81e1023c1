"""What only researchers and kvlinker's authors run: the papers' figures, comparisons with peers,
long runs under load, measurements of parts, and the training of the model in the box.

A function with the decorator ``benchmark`` in a file of this package is a command of
``kvlinker-lab``.
"""
