"""Measures servers under load: the same traffic over HTTP for every competitor.

``traffic`` makes conversations from a seed, ``prompts`` writes them as requests, ``driver`` sends
these and times the answers, ``servers`` starts what answers, ``report`` makes rows and a plot of
it, and ``run`` brings all together.
"""
