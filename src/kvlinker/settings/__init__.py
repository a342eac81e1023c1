"""Everything that can be configured, and where it is read from."""

from kvlinker.settings.settings import (
    BUNDLED_MODEL,
    CONFIG_FILE_VARIABLE,
    SHARED_TIER_SETTINGS,
    Settings,
    WeightFormat,
)
from kvlinker.settings.sources import load_settings, read_settings

__all__ = [
    "BUNDLED_MODEL",
    "CONFIG_FILE_VARIABLE",
    "SHARED_TIER_SETTINGS",
    "Settings",
    "WeightFormat",
    "load_settings",
    "read_settings",
]
