"""Reads settings: arguments first, then ``KVLINKER_*`` variables, then a TOML file. Reports errors
in them."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from kvlinker.base.errors import InvalidRequestError, PolicyError, did_you_mean
from kvlinker.settings.settings import (
    CONFIG_FILE_VARIABLE,
    VARIABLE_PREFIX,
    Settings,
    TenantQuota,
)

REMOVED = {"redis_space": "Redis limits itself: set its maxmemory and maxmemory-policy."}
"""Settings of earlier versions, and what to do instead."""

OTHER_VARIABLES = {"config", "api_key", "base_url", "new_encryption_key"}
"""The rest of the names of prefixed variables that are not settings: here, in ``kvlinker ingest``
and ``caches rekey``, and in the packages of ``integrations``."""


def load_settings(**options: Any) -> Settings:
    """Settings from the given options (None means not given), the environment and the TOML file.

    Raises InvalidRequestError, which names each bad setting, its value, what is allowed, and where
    it comes from.
    """
    return read_settings(options, source=lambda name: f"option {name}")


def read_settings(options: Mapping[str, Any], *, source: Callable[[str], str]) -> Settings:
    """``load_settings`` for options that users write in another way: ``source`` says how, given an
    option's name."""
    given = {name: value for name, value in options.items() if value is not None}
    file = os.environ.get(CONFIG_FILE_VARIABLE)
    variables = {
        variable.lower().removeprefix(VARIABLE_PREFIX.lower()): variable
        for variable in os.environ
        if variable.upper().startswith(VARIABLE_PREFIX)
    }

    def origin(name: str) -> str:
        if name in given:
            return source(name)
        if name in variables:
            return f"variable {variables[name]}"
        return f"file {file}" if file else "its default"

    _check_variables(variables)
    try:
        return Settings(**given)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        complaints = " ".join(_complaint(entry, origin(str(entry["loc"][0]))) for entry in errors)
        raise InvalidRequestError(
            complaints, param=str(errors[0]["loc"][0])
        ) from None  # its text contains secrets
    except PolicyError as error:
        name = error.param or "policy"
        raise PolicyError(f"{error.message} It comes from {origin(name)}.", param=name) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"{file} is not valid TOML: {error}") from error


def _check_variables(variables: Mapping[str, str]) -> None:
    """Raises InvalidRequestError for a variable that looks like a misspelt setting; others may have
    another meaning."""
    for name in variables.keys() - Settings.model_fields.keys() - OTHER_VARIABLES:
        if meant := REMOVED.get(name) or did_you_mean(name, Settings.model_fields).strip():
            raise InvalidRequestError(
                f"There is no setting {name!r} (from variable {variables[name]}). {meant}"
            )


def _complaint(error: ErrorDetails, origin: str) -> str:
    """Return a message about an invalid setting, and the values it may have. Values and keys that
    may be secret are left out."""
    name, *inner = map(str, error["loc"])
    path = ".".join((name, *("*" for _ in inner[:1]), *inner[1:]))
    if error["type"] == "extra_forbidden":
        known = (
            [f"{name}.*.{field}" for field in TenantQuota.model_fields]
            if inner
            else Settings.model_fields
        )
        meant = REMOVED.get(path) or did_you_mean(path, known).strip()
        return f"There is no setting {path!r} (from {origin}). {meant}".strip()
    field = Settings.model_fields[name]
    if inner or not field.repr or "SecretStr" in str(field.annotation):
        subject, meant = f"{path} (from {origin})", ""
    else:
        subject = f"{path} is {_shortened(error['input'])} (from {origin})"
        meant = did_you_mean(str(error["input"]), _words(error))
    return f"{subject}: {_rule(error, field)}.{meant}"


def _rule(error: ErrorDetails, field: FieldInfo) -> str:
    """Return the rule for the setting's value, where it can be stated in general; otherwise why the
    value was refused."""
    if error["type"] == "value_error":
        return error["msg"].removeprefix("Value error, ")
    if "ByteSize" in str(field.annotation):
        return "it must be a size such as 4GiB"
    if field.annotation in (int, int | None):
        bounds = {
            name: getattr(part, name)
            for part in field.metadata
            for name in ("ge", "le")
            if hasattr(part, name)
        }
        return f"it must be a whole number from {bounds['ge']}" + (
            f" to {bounds['le']}" if "le" in bounds else " on"
        )
    if field.annotation is bool:
        return "it must be true or false"
    return re.sub(r"^(Input|String) should", "it must", error["msg"].removeprefix("Value error, "))


def _words(error: ErrorDetails) -> list[str]:
    """The words that a setting may be, where there are only some."""
    expected = str(error.get("ctx", {}).get("expected", ""))
    return re.findall(r"'([^']+)'", expected)


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:99]}…"
