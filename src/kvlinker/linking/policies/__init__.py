"""The policies that ship with kvlinker, one file per family; the registry imports every module of
this package."""
