"""The policies that ship with kvlinker, one file per family; importing this package registers every file's policies."""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
