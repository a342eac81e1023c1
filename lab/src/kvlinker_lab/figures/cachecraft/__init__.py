"""Figures of Cache-Craft (SIGMOD 2025)."""
