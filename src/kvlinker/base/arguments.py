"""Checks keyword arguments of the Python API: the error for an unknown one names the nearest known
one."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from functools import wraps
from inspect import Parameter, iscoroutinefunction, isfunction, signature
from typing import Any, ParamSpec, TypeVar, cast

from kvlinker.base.errors import UnknownArgumentError

C = TypeVar("C")
P = ParamSpec("P")
T = TypeVar("T")


def names_arguments(cls: type[C]) -> type[C]:
    """Check the keyword arguments of a class's public methods. Methods with a ``**`` parameter are
    left as they are."""
    for name, method in list(vars(cls).items()):
        if isfunction(method) and (name == "__init__" or not name.startswith("_")):
            parameters = signature(method).parameters.values()
            if all(parameter.kind is not Parameter.VAR_KEYWORD for parameter in parameters):
                setattr(cls, name, _checked(method, ()))
    return cls


def takes_fields_of(kind: type) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Check the keyword arguments of a method whose ``**`` parameter takes those of a
    ``TypedDict``."""
    return lambda method: _checked(method, kind.__annotations__)


def _checked(method: Callable[P, T], beside: Iterable[str]) -> Callable[P, T]:
    """Return the method with a check of its keyword arguments: its own, and those in ``beside``."""
    parameters = list(signature(method).parameters.values())[1:]  # without self
    known = [each.name for each in parameters if each.kind is not Parameter.VAR_KEYWORD]
    known += [name for name in beside if name not in known]

    def check(given: Iterable[str]) -> None:
        for name in given:
            if name not in known:
                raise UnknownArgumentError.of(method.__name__, name, known)

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        check(kwargs)
        return method(*args, **kwargs)

    @wraps(method)
    async def call_async(*args: P.args, **kwargs: P.kwargs) -> Any:
        check(kwargs)
        return await cast(Coroutine[Any, Any, Any], method(*args, **kwargs))

    return cast(Callable[P, T], call_async) if iscoroutinefunction(method) else call
