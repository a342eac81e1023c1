"""Everything that can be configured, and where it is read from."""

from kvlinker.settings.linking import AUTO, UNMEASURED
from kvlinker.settings.model import BUNDLED_MODEL, WeightFormat
from kvlinker.settings.options import Options
from kvlinker.settings.settings import CONFIG_FILE_VARIABLE, Settings
from kvlinker.settings.sources import load_settings, read_settings
from kvlinker.settings.storage import SHARED_TIER_SETTINGS

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
