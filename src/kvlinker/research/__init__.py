"""Measures kvlinker: benchmarks, answer quality, the papers' figures, and advice on tiers. The command line uses it."""
