"""``kvlinker pull`` and ``kvlinker models``: bring models from the Hugging Face hub onto this
machine, and list those that are here."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ByteSize
from rich.table import Table

from kvlinker.base.errors import ModelLoadError
from kvlinker.cli.console import BAD_USAGE, FAILURE, INTERRUPTED, fail, output_console
from kvlinker.engines.contract.gguf_files import SUFFIX, chosen_files, gguf_files
from kvlinker.engines.contract.machine_models import (
    OTHER_WEIGHTS,
    SAFE_WEIGHTS,
    bytes_of,
    models_here,
)
from kvlinker.engines.contract.model_place import CONFIG

BESIDES_WEIGHTS = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py")
"""The other files that loading a model reads: configuration, tokenizer, chat template, code."""

SUBFOLDERS = "*/*"
"""The files in folders of a repository, which hold other formats of the same weights."""


def pull(
    model: Annotated[
        str,
        typer.Argument(
            help="Hugging Face hub id, such as HuggingFaceTB/SmolLM2-135M-Instruct; of a repository"
            " with GGUF files with a part of the file's name: ID:Q4_K_M.",
            metavar="MODEL",
        ),
    ],
) -> None:
    """Download a model from the Hugging Face hub into its cache on this machine.

    What is there already is not downloaded again, and a download that was interrupted goes on.
    HF_HOME says where the cache is, HF_TOKEN whose models may be read.
    """
    if Path(model).exists():
        raise fail(f"{model} is on this machine: there is nothing to download", BAD_USAGE)
    folder = download(model)
    files = _ggufs(model) or tuple(folder.iterdir())
    typer.echo(folder)
    typer.echo(
        f"kvlinker: {model} takes {_size(bytes_of(files))}; `kvlinker run {model}` talks with it",
        err=True,
    )


def is_downloaded(model: str) -> bool:
    """Return whether a model is on this machine, or its configuration is in the hub's cache: what
    else of it is missing, loading it downloads."""
    from huggingface_hub import try_to_load_from_cache

    if Path(model).is_dir() or _ggufs(model):
        return True
    return ":" not in model and isinstance(try_to_load_from_cache(model, CONFIG), str)


def _ggufs(model: str) -> tuple[Path, ...]:
    """Return the GGUF files of a model; none where it is of another kind or not on this machine."""
    try:
        return gguf_files(model)
    except ModelLoadError:
        return ()


def download(model: str) -> Path:
    """Download what is missing of a model of the hub, and return its folder in the cache; the
    command ends where that cannot be done."""
    from huggingface_hub import HfApi, constants, snapshot_download, try_to_load_from_cache
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    repository, _, part = model.partition(":")
    try:
        found = HfApi().model_info(repository, files_metadata=True)
        sizes = {file.rfilename: file.size or 0 for file in found.siblings or ()}
        wanted = _wanted([name for name in sizes if "/" not in name], model, part)
        missing = [
            name
            for name in wanted
            if not isinstance(try_to_load_from_cache(repository, name, revision=found.sha), str)
        ]
        if missing:
            nbytes = sum(sizes[name] for name in missing)
            _check_room(nbytes, Path(constants.HF_HUB_CACHE))
            typer.echo(f"kvlinker: {model}: {len(missing)} files, {_size(nbytes)}", err=True)
        return Path(
            snapshot_download(repository, allow_patterns=wanted, ignore_patterns=SUBFOLDERS)
        )
    except KeyboardInterrupt:
        raise fail("interrupted: the same command goes on from here", INTERRUPTED) from None
    except typer.Exit:
        raise
    except Exception as error:  # connections fail by errors of the library beneath the hub's
        raise fail(_why_not(model, error), FAILURE) from error


def _wanted(names: Sequence[str], model: str, part: str) -> list[str]:
    """Return those files of a repository that loading the model reads: the GGUF file with ``part``
    in its name where one is asked for, or there is nothing else. Ends the command where there is no
    model."""
    if part or (CONFIG not in names and any(name.endswith(SUFFIX) for name in names)):
        try:
            return chosen_files(model, names, part)
        except ModelLoadError as error:
            raise fail(str(error), FAILURE) from error
    if CONFIG not in names:
        raise fail(
            f"{model} is no model of transformers: it has no {CONFIG}, nor a GGUF file.", FAILURE
        )
    safe = any(Path(name).match(SAFE_WEIGHTS) for name in names)
    patterns = (*BESIDES_WEIGHTS, *((SAFE_WEIGHTS,) if safe else OTHER_WEIGHTS))
    return [name for name in names if any(Path(name).match(pattern) for pattern in patterns)]


def _check_room(nbytes: int, cache: Path) -> None:
    """End the command where the disk has no room for the files."""
    there = next(folder for folder in (cache, *cache.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(there).free
    if nbytes > free:
        raise fail(
            f"{_size(nbytes)} are to be downloaded, but {there} has {_size(free)} free. Make room,"
            " or set HF_HOME to a folder on another disk.",
            FAILURE,
        )


def _why_not(model: str, error: Exception) -> str:
    """Say why the hub does not have, or does not give, a model, and what to do."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
    )

    match error:
        case GatedRepoError():
            return (
                f"{model} is given only to those who accept its terms: accept them on"
                f" https://huggingface.co/{model}, and log in with `hf auth login`"
            )
        case RepositoryNotFoundError():
            return (
                f"the hub has no model {model!r}, or not for everybody. Check the id; for a model"
                " of your own, log in with `hf auth login`"
            )
        case HFValidationError():
            return f"{model!r} is no id of the hub: write NAMESPACE/NAME"
        case HfHubHTTPError():
            return f"the hub answered: {str(error).splitlines()[0]}"
    first = (str(error).splitlines() or [type(error).__name__])[0]
    return f"{model} could not be downloaded: {first} Is the hub reachable? Then try again."


def models(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(
            exists=True,
            file_okay=False,
            help="Also list the models in these folders, and in folders directly below.",
            metavar="FOLDER...",
        ),
    ] = None,
) -> None:
    """List the models on this machine: the hub's cache, those of Ollama and LM Studio, the model in
    the box, and folders.

    The context window is what a model's configuration says; `kvlinker check MODEL` finds where the
    model goes on, and whether it can be linked.
    """
    table = Table(box=None, pad_edge=False)
    table.add_column("model", overflow="fold")
    for title in ("size", "window"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("weights", no_wrap=True)
    for model in models_here(folders or []):
        window = "-" if model.window is None else f"{model.window:,}"
        table.add_row(model.name, _size(model.nbytes), window, model.weights)
    output_console().print(table)


def _size(nbytes: int) -> str:
    return ByteSize(nbytes).human_readable(decimal=True, separator=" ")
