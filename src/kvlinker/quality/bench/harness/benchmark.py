"""Defines benchmarks, registers them by name, and lists them without importing them.

A benchmark is a function with the decorator ``benchmark``: it takes a ``Setup``, and as keywords
the options of its command, such as ``kvlinker bench NAME``, declared with typer. It returns a
``Report``. Its module imports modules that need torch when it runs, so that the command's help is
fast.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_args

import typer

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.registry import Registry
from kvlinker.base.threads import set_threads
from kvlinker.linking import parse_policy
from kvlinker.linking.policy import SIGN
from kvlinker.quality.progress import Progress, silent
from kvlinker.settings import Settings, WeightFormat

if TYPE_CHECKING:
    import torch

    from kvlinker.engines.embedded.model.loaded import LoadedModel
    from kvlinker.quality.bench.harness.report import Report, Row
    from kvlinker.quality.bench.harness.subject import MeasuredModel

Repeat = Annotated[int, typer.Option(min=1, help="Measurements of each case, after one warm-up.")]
Chunks = Annotated[int, typer.Option(min=1, help="Chunks per prompt.")]
ChunkTokens = Annotated[int, typer.Option(min=1, help="Tokens per chunk.")]
FreshTokens = Annotated[int, typer.Option(min=1, help="Tokens after the chunks.")]
Policies = Annotated[str, typer.Option(help="Policies to compare, with commas between.")]

WeightFormats = Annotated[
    str,
    typer.Option(
        help=(
            "Formats of the weights to compare, with commas between: auto, bf16, int8, int4; by"
            " default that of --weights alone."
        ),
        show_default=False,
    ),
]

ComparedPolicies = Annotated[
    str | None,
    typer.Option(
        help=(
            "Policies to compare, with commas between; by default full, naive, the policy that the"
            " settings give to requests and its parts, legolink-16, attnlink-16 and random-15."
        ),
        show_default=False,
    ),
]

PACKAGE = "kvlinker.quality.bench"
"""The package whose benchmarks are commands of ``kvlinker bench``."""

ENTRY_POINT_GROUP = "kvlinker.benchmarks"
"""The entry points by which other packages add commands to ``kvlinker bench``."""


@dataclass(frozen=True)
class Setup:
    """The arguments of every benchmark."""

    settings: Settings
    """Name the model, unless ``shape`` does, and how chunks are made."""
    shape: str | None = None
    """The shape of a model with random weights."""
    command: str = "kvlinker bench"
    """The command line that reproduces the run."""
    progress: Progress = silent

    def subject(self, **options: Any) -> MeasuredModel:
        """Make random weights of the shape, or load the model that the settings name where there
        is none. ``options`` are listed in the report's settings.

        Raises InvalidRequestError for an unknown shape.
        """
        from kvlinker.engines.embedded.model_loading import load_model
        from kvlinker.quality.bench.harness.shapes import random_model
        from kvlinker.quality.bench.harness.subject import MeasuredModel

        if self.shape is None:
            name, loaded = self.settings.served_name, load_model(self.settings)
        else:
            dtype, device = self._placement()
            weights = self.settings.weights
            name = self.shape
            loaded = random_model(name, dtype=dtype, device=device, weights=weights)
        return MeasuredModel(name, self.command, loaded, options)

    def subjects(self, formats: Sequence[str], **options: Any) -> dict[str, MeasuredModel]:
        """Load the model with its weights in each of the formats, by name; in that of the settings
        if there are none.

        Raises InvalidRequestError for an unknown format.
        """
        if unknown := set(formats) - set(get_args(WeightFormat)):
            known = ", ".join(get_args(WeightFormat))
            raise InvalidRequestError(
                f"Unknown weight format {min(unknown)!r}; known are {known}.", param="formats"
            )
        return {
            form: (
                replace(self, settings=self.settings.model_copy(update={"weights": form})).subject(
                    **options
                )
            )
            for form in dict.fromkeys(formats or (self.settings.weights,))
        }

    def transformer(self) -> Any:
        """Load the model as transformers has it, with plain weights, for a comparison."""
        from kvlinker.engines.contract.model_files import read_model
        from kvlinker.quality.bench.harness.shapes import random_transformer

        if self.shape is None:
            return read_model(self.settings)[0]
        dtype, device = self._placement()
        return random_transformer(self.shape, dtype=dtype, device=device)

    def _placement(self) -> tuple[torch.dtype, torch.device]:
        """Return the dtype and the device of random weights, and have PyTorch compute in as many
        threads as the settings say."""
        from kvlinker.engines.contract.model_files import choose_device, choose_dtype
        from kvlinker.engines.embedded.model_loading import multiplies_bf16

        settings = self.settings
        set_threads(settings.threads)
        device = choose_device(settings.device)
        own = multiplies_bf16(settings)
        return choose_dtype(settings.dtype, device, settings.weights, own_bf16=own), device


Run = Callable[..., "Report"]


@dataclass(frozen=True)
class Benchmark:
    """Describes one benchmark."""

    name: str
    run: Run
    settings: tuple[str, ...] = ()
    """The fields of ``Settings`` that are options of its command, in addition to those that name
    the model."""
    runs_model: bool = True
    """False if no model runs: then no option names one."""
    plot: Callable[[Sequence[Row], Path], None] | None = None
    """Draws the rows that are shown into a file."""
    shown: Callable[[Sequence[Row]], Sequence[Row]] | None = None
    """Picks the rows to print and to draw; None shows all."""


_registry: Registry[Benchmark] = Registry("benchmark", own=PACKAGE, group=ENTRY_POINT_GROUP)


def benchmark(name: str, **about: Any) -> Callable[[Run], Run]:
    """Make a decorator that registers a function as the benchmark of this name.

    ``about`` are further fields of ``Benchmark``. The decorator raises ValueError if another
    benchmark has the name.
    """

    def decorate(run: Run) -> Run:
        _registry.add(name, Benchmark(name, run, **about))
        return run

    return decorate


def find_benchmark(name: str, package: str = PACKAGE) -> Benchmark:
    """Return the package's benchmark of this name.

    Raises InvalidRequestError, which lists the names, for an unknown one.
    """
    declared = declared_benchmarks(package)
    if name in declared:
        import_module(declared[name].module)
        if name in (registered := _registry.registered()):
            return registered[name]
    raise InvalidRequestError(
        f"Unknown benchmark {name!r}; known are {', '.join(declared)}.", param="name"
    )


class DeclaredBenchmark(NamedTuple):
    """The module of a benchmark and its summary, found without importing it."""

    module: str
    summary: str


@cache
def declared_benchmarks(package: str = PACKAGE) -> Mapping[str, DeclaredBenchmark]:
    """Find the benchmarks of a package by name; kvlinker's own, and those that other packages have
    entry points for.

    They are read from the package's sources: to import all of them would take seconds.
    """
    found = {}
    for path in (
        path for folder in import_module(package).__path__ for path in Path(folder).glob("*.py")
    ):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            match node:
                case ast.FunctionDef(
                    decorator_list=[
                        ast.Call(
                            func=ast.Name(id="benchmark"), args=[ast.Constant(value=str(name))]
                        )
                    ]
                ):
                    summary = (ast.get_docstring(node) or "").partition("\n")[0]
                    found[name] = DeclaredBenchmark(f"{package}.{path.stem}", summary)
    for entry_point in entry_points(group=ENTRY_POINT_GROUP) if package == PACKAGE else ():
        found[entry_point.name] = DeclaredBenchmark(
            entry_point.module, f"A benchmark of {entry_point.module}."
        )
    return MappingProxyType(dict(sorted(found.items())))


def compared_policies(text: str | None, settings: Settings) -> list[str]:
    """Read policies with commas between. Without any, return the default ones: among them are the
    policy of requests under these settings, and the parts of its union. Raises PolicyError for a
    bad one."""
    usual = ",".join((settings.usual_policy, *settings.usual_policy.split(SIGN)))
    return policy_names(text or f"full,naive,{usual},legolink-16,attnlink-16,random-15")


def supported_policies(policies: Sequence[str], model: LoadedModel) -> list[str]:
    """Return those policies under which the model can be linked: of the ones that are compared by
    default, the others are left out."""
    return [name for name in policies if model.unsupported(parse_policy(name)) is None]


def policy_names(text: str) -> list[str]:
    """Read policies with commas between. Raises PolicyError for a bad one."""
    return list(dict.fromkeys(parse_policy(name.strip()).name for name in text.split(",")))


def names(text: str) -> tuple[str, ...]:
    """Read words with commas between."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def counts(text: str) -> list[int]:
    """Read whole numbers with commas between. Raises InvalidRequestError for others, and for
    numbers below 1."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise InvalidRequestError(
            f"{text!r} is not a list of whole numbers with commas between."
        ) from error
    if min(found) < 1:
        raise InvalidRequestError(f"{text!r}: every number must be at least 1.")
    return found
