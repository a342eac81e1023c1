"""Everything that can be configured, and where it is read from."""

from kvlinker.settings.options import Options
from kvlinker.settings.settings import (
    AUTO,
    BUNDLED_MODEL,
    CONFIG_FILE_VARIABLE,
    SHARED_TIER_SETTINGS,
    UNMEASURED,
    Settings,
    WeightFormat,
)
from kvlinker.settings.sources import load_settings, read_settings

__all__ = [
    "AUTO",
    "BUNDLED_MODEL",
    "CONFIG_FILE_VARIABLE",
    "SHARED_TIER_SETTINGS",
    "UNMEASURED",
    "Options",
    "Settings",
    "WeightFormat",
    "load_settings",
    "read_settings",
]
