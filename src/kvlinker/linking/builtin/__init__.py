"""The policies that ship with kvlinker; importing this package registers them."""

from kvlinker.linking.builtin import baselines, cacheblend, cachecraft, controls, epic, prefix, query

__all__ = ["baselines", "cacheblend", "cachecraft", "controls", "epic", "prefix", "query"]
