"""Errors that users see. Each names the value at fault and the way out, in words that hold
for the library, the server and the commands; the server maps them to HTTP."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Self

LONGEST_MISSPELT = 64
"""The characters of a word beyond which nothing is near it: comparing takes long; chosen by
hand."""


class KVLinkerError(Exception):
    """Base of all errors that kvlinker raises on purpose.

    ``code`` and ``param`` go into OpenAI-shaped error bodies; ``status`` is the HTTP status. If
    that is 500, the message may name internals, such as paths: HTTP callers get ``summary``
    instead.
    """

    status = 500
    type = "server_error"
    code = "internal_error"
    summary = "The server failed while answering."

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class InvalidRequestError(KVLinkerError):
    """The caller's input is invalid; the message names the allowed values."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class UnknownArgumentError(InvalidRequestError, TypeError):
    """Raised for an argument or a field that a call does not take; like Python's own, a
    TypeError."""

    code = "unknown_parameter"


class ContextLengthError(InvalidRequestError):
    """Prompt plus requested output exceed the model's context window or the KV pool."""

    code = "context_length_exceeded"

    excess: tuple[int, int] | None = None
    """The prompt's tokens, and the most that are taken, where they are known."""

    def exceeding(self, tokens: int, most: int) -> Self:
        """Say how many tokens the prompt has, and how many are taken; return the error."""
        self.excess = (tokens, most)
        return self


class PolicyError(InvalidRequestError):
    """Unknown linking policy, or a parameter outside its range."""

    code = "invalid_policy"


class AuthenticationError(KVLinkerError):
    """No API key, or one that the server does not know."""

    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"


class PermissionDeniedError(KVLinkerError):
    """The caller's key is known, but does not have the right."""

    status = 403
    type = "invalid_request_error"
    code = "permission_denied"


class QuotaExceededError(KVLinkerError):
    """The tenant would have more than its quota; nothing was kept. Trying again does not help, so
    it is no 429."""

    status = 403
    type = "insufficient_quota"
    code = "quota_exceeded"


class PinLimitError(KVLinkerError):
    """Pinned KV would take up too much of the store; nothing was pinned."""

    status = 403
    type = "insufficient_quota"
    code = "pin_limit_exceeded"


class ContextCacheNotFoundError(KVLinkerError):
    """Unknown, expired or another tenant's context cache: all alike."""

    status = 404
    type = "invalid_request_error"
    code = "context_cache_not_found"

    def __init__(self, cache_id: str) -> None:
        super().__init__(
            f"No context cache {cache_id!r}: it does not exist, has expired or was deleted."
            " Create it again.",
            param="id",
        )
        self.cache_id = cache_id


class ResponseNotFoundError(KVLinkerError):
    """Unknown, expired or another tenant's response, or one that was not kept, or an item of such:
    all alike."""

    status = 404
    type = "invalid_request_error"
    code = "response_not_found"


class ContextCacheModelError(InvalidRequestError):
    """The context cache was made with another model, whose tokens would mean something else to this
    one."""

    code = "context_cache_model_mismatch"

    def __init__(self, cache_id: str, *, made_with: str, served: str) -> None:
        super().__init__(
            f"Context cache {cache_id!r} was made with another model ({made_with}, or other weights"
            f" or dtype) than the one served now ({served}). Create it again.",
            param="id",
        )
        self.cache_id = cache_id


class ModelNotFoundError(KVLinkerError):
    """The request names a model that this server does not serve."""

    status = 404
    type = "invalid_request_error"
    code = "model_not_found"


class ModelLoadError(KVLinkerError):
    """A path or hub id that cannot be loaded as a causal language model."""

    code = "model_load_failed"


class UnsupportedModelError(KVLinkerError):
    """The model loads, but linking its KV would not be exact."""

    code = "unsupported_model"


class OverloadedError(KVLinkerError):
    """Too many requests wait already; try again after ``retry_after`` seconds."""

    status = 429
    type = "overloaded_error"
    code = "overloaded"

    def __init__(self, message: str, *, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineClosedError(KVLinkerError):
    """The engine was shut down while the request waited or ran; another server answers, or this
    one's successor, after about ``retry_after`` seconds."""

    status = 503
    code = "engine_closed"
    retry_after = 5


class ModelLoadingError(KVLinkerError):
    """The server still loads its model; it answers after about ``retry_after`` seconds."""

    status = 503
    code = "model_loading"

    def __init__(self, message: str, *, retry_after: int = 5) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class StoreError(KVLinkerError):
    """The state directory or the catalog file cannot be used; the message names it and the way
    out."""

    code = "store_unusable"
    summary = "The server cannot use its store, or this entry in it."


class CatalogUnavailableError(StoreError):
    """The catalog's database does not answer; it may again after about ``retry_after`` seconds."""

    status = 503
    code = "catalog_unavailable"
    summary = "The catalog of context caches does not answer."
    retry_after = 2


def did_you_mean(text: str, known: Iterable[str]) -> str:
    """A sentence, with a space before it, that offers the known word nearest to ``text``; empty if
    none is near."""
    near = (
        get_close_matches(text, list(known), n=1, cutoff=0.75)
        if len(text) <= LONGEST_MISSPELT
        else ()
    )
    return f" Did you mean {near[0]!r}?" if near else ""


def shortened(text: str, longest: int) -> str:
    """Return the text with its middle left out where it has more than ``longest`` characters."""
    if len(text) <= longest:
        return text
    end = longest // 4
    return f"{text[: longest - end - 3]} … {text[-end:]}"
