"""The commands ``kvlinker fleet`` and ``kvlinker router``."""
