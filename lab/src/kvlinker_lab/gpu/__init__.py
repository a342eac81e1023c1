"""The first hour on a GPU: what is tried there, and one report of it."""
