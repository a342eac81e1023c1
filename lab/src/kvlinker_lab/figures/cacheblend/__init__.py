"""Figures of CacheBlend (EuroSys 2025)."""
