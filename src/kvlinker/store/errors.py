"""The error of a store or catalog that cannot be used at all; damage to single chunks is never an error."""

from __future__ import annotations

from kvlinker.errors import KVLinkerError


class StoreError(KVLinkerError):
    """The state directory or the catalog file cannot be used; the message names it and the way out."""

    code = "store_unusable"
    summary = "The server cannot use its store, or this entry in it."
