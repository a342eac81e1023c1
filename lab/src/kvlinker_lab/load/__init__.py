"""Measures servers under load: the same traffic over HTTP for every competitor.

``traffic`` makes conversations from a seed, ``prompts`` writes them as requests, ``driver`` sends
the requests and times the answers, ``servers`` starts servers, ``report`` makes rows and a plot,
and ``run`` measures all competitors.
"""
