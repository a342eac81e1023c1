"""Ids of context caches in the paths of routes."""

from starlette.convertors import StringConvertor, register_url_convertor


class _CacheIdConvertor(StringConvertor):
    """Takes any segment for an id but the names of neighbouring routes, whose other methods are a
    405, not a 404."""

    regex = r"(?!(?:extract|prefetch|search|split|usage)$)[^/]+"


register_url_convertor("cache_id", _CacheIdConvertor())

CACHE_ID = "{cache_id:cache_id}"
"""The segment of a path that is the parameter ``cache_id``."""
