"""The first hour on a GPU: its steps, and one report."""
