"""Figures of EPIC (ICML 2025)."""
