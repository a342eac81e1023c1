"""Runs the same model in kvlinker and in other engines, each in processes of its own, and measures
them alike."""
