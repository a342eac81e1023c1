"""Groups of commands that import a command when it runs, so that ``--help`` is fast."""

from __future__ import annotations

import ast
from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup

from kvlinker.base import own_process


class LazyGroup(TyperGroup):
    """Lists commands by name and summary, and loads the one that runs."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name, summary in self.summaries().items():
            self.commands[name] = TyperCommand(name, help=summary)

    @abstractmethod
    def summaries(self) -> Mapping[str, str]:
        """Return the summaries of the commands to be loaded, by name, in the order in which they
        are listed."""

    @abstractmethod
    def load(self, name: str) -> Any:
        """Return one of the commands that ``summaries`` names."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command to be run. Its import may load PyTorch, which reads the environment
        then."""
        own_process.set_up()
        name, command, rest = super().resolve_command(ctx, args)
        return (
            name,
            self.load(name) if name is not None and name in self.summaries() else command,
            rest,
        )


class ModuleGroup(LazyGroup):
    """A group whose commands are functions, or applications of typer, in modules."""

    places: ClassVar[Mapping[str, str]]
    """``module:name`` of each command."""

    def summaries(self) -> Mapping[str, str]:
        return {name: _summary(*place.split(":")) for name, place in self.places.items()}

    def load(self, name: str) -> Any:
        module, _, attribute = self.places[name].partition(":")
        found = getattr(import_module(module), attribute)
        if isinstance(found, typer.Typer):
            return typer.main.get_group(found)
        return command_of(name, found)


def command_of(name: str, function: Callable[..., None]) -> Any:
    """Make the command of a function, as typer does."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(name)(function)
    return typer.main.get_command(app)


@cache
def _summary(module: str, name: str) -> str:
    """Read a function's docstring, or the help text of a Typer app, without importing its
    module."""
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        match node:
            case ast.FunctionDef(name=found) if found == name:
                return ast.get_docstring(node) or ""
            case ast.Assign(targets=[ast.Name(id=found)], value=ast.Call(keywords=keywords)) if (
                found == name
            ):
                return "".join(
                    str(each.value.value)
                    for each in keywords
                    if each.arg == "help" and isinstance(each.value, ast.Constant)
                )
    raise AssertionError(f"{module} has no {name}")
