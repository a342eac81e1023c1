"""Tiers that servers share, in media outside this machine: only their settings import them."""
