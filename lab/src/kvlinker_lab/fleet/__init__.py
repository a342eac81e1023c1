"""Compares how requests are routed in a fleet: simulated event by event, and on real servers."""
