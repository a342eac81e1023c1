"""The policies that ship with kvlinker; importing this package registers them."""

from kvlinker.linking.builtin import baselines, controls, epic

__all__ = ["baselines", "controls", "epic"]
