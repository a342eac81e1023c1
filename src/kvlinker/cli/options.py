"""Options made from ``Settings``: each field that a command names becomes an option of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from pydantic import ByteSize
from pydantic.fields import FieldInfo
from rich.markup import escape

from kvlinker.cli.console import BAD_USAGE, fail, failures
from kvlinker.engines.contract.joining import is_installed
from kvlinker.settings import CONFIG_FILE_VARIABLE, Settings, read_settings

Command = Callable[..., None]

_CONFIG = Annotated[
    Path | None,
    typer.Option(help="TOML file with settings.", exists=True, dir_okay=False, show_default=False),
]

Url = Annotated[
    str | None,
    typer.Option(
        help="A running server; by default that which runs on the state directory, or none: then"
        " the work is done here."
    ),
]
ApiKey = Annotated[
    str | None, typer.Option(envvar="KVLINKER_API_KEY", help="Whose context caches.")
]
MetadataPairs = Annotated[
    list[str] | None,
    typer.Option(
        help="Only those with this pair; may be given several times.", metavar="KEY=VALUE"
    ),
]


def parse_pairs(options: list[str] | None) -> dict[str, str]:
    """Return the pairs that ``KEY=VALUE`` options write; the command ends at one that is written in
    another way."""
    pairs = dict(option.partition("=")[::2] for option in options or ())
    if any("=" not in option for option in options or ()):
        raise fail("--metadata takes KEY=VALUE", BAD_USAGE)
    return pairs


def settings_options(*names: str) -> Callable[[Command], Command]:
    """Give a command options for the named fields of Settings, and ``--config``.

    The command takes the settings as its first argument. Options win over ``KVLINKER_*`` variables
    and the file.
    """
    fields = {name: Settings.model_fields[name] for name in names}

    def decorate(command: Command) -> Command:
        @wraps(command)
        def run(*, config: Path | None, **arguments: Any) -> None:
            if config is not None:
                os.environ[CONFIG_FILE_VARIABLE] = str(config)
            options = {name: arguments.pop(name) for name in fields}
            with failures(BAD_USAGE):
                settings = read_settings(options, source=_flag)
            command(settings, **arguments)

        types = get_type_hints(command, include_extras=True)
        own = [
            p.replace(annotation=types[p.name])
            for p in list(signature(command).parameters.values())[1:]
        ]
        options = [
            *(_option(name, fields[name]) for name in sorted(fields, key=_order)),
            _parameter("config", _CONFIG),
        ]
        parameters = [p.replace(kind=Parameter.KEYWORD_ONLY) for p in (*own, *options)]
        run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


_METAVARS: dict[Any, str | None] = {
    bool: None,
    int: "N",
    int | None: "N",
    float: "N",
    ByteSize: "SIZE",
    ByteSize | None: "SIZE",
    Path: "PATH",
}


COMMON = (
    *("model", "port", "state_dir", "policy", "implicit", "system_prompt", "weights", "threads"),
    *("host", "api_keys"),
)
"""The settings that most users give, in the order in which --help shows them, before all others."""

_PANELS = {
    "model": "Model and answers",
    "policy": "Linking",
    "max_model_len": "Engine",
    "state_dir": "Store",
    "role": "Fleet",
    "audit": "Audit",
    "host": "Server",
}
"""The headings of --help, by the first setting under each."""


def _panel(name: str) -> str:
    """Return the heading under which --help shows a setting."""
    if name in COMMON:
        return "Common"
    fields = list(Settings.model_fields)
    before = fields[: fields.index(name) + 1]
    return next(_PANELS[each] for each in reversed(before) if each in _PANELS)


def _order(name: str) -> int:
    return COMMON.index(name) if name in COMMON else len(COMMON)


def _option(name: str, field: FieldInfo) -> Parameter:
    """Values are passed on as text: Settings parses them, and complains about them."""
    kind = bool if field.annotation is bool else str
    option = typer.Option(
        help=escape(f"{field.description} (KVLINKER_{name.upper()})"),
        show_default=_shown_default(field),
        metavar=_METAVARS.get(field.annotation, "TEXT"),
        rich_help_panel=_panel(name),
        hidden=name == "vllm_options" and not is_installed("vllm"),
    )
    return _parameter(name, Annotated[kind | None, option])


def _parameter(name: str, annotation: Any) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _shown_default(field: FieldInfo) -> str | bool:
    """Return the default that --help shows; False if there is none to show."""
    default = field.get_default(call_default_factory=True, validated_data={})
    if default in (None, (), {}, False) or "default" in (field.description or ""):
        return False
    return default.human_readable() if isinstance(default, ByteSize) else str(default)


def _flag(name: str) -> str:
    return f"option --{name.replace('_', '-')}"
