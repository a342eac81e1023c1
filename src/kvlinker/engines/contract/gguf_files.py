"""Finds GGUF files, the format of llama.cpp, by the names that people have for them. It loads no
torch, so that commands answer at once."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from blake3 import blake3
from huggingface_hub import constants

from kvlinker.base.errors import ModelLoadError
from kvlinker.settings import Settings

SUFFIX = ".gguf"
OLLAMA, LM_STUDIO = "ollama:", "lmstudio:"
"""Beginnings of the names of models that Ollama or LM Studio has downloaded."""

SPLIT = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
"""The name of one of the files into which llama.cpp splits large models."""

PART_OF_NAME = re.compile(r"(?!\.+$)[\w.-]+")
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")

PROJECTOR = "mmproj"
"""A part of the names of files that read pictures for another model."""

OLLAMA_MODEL = "application/vnd.ollama.image.model"
"""The kind of the layer in Ollama's manifests that is a GGUF file."""

OLLAMA_OWN = ["registry.ollama.ai", "library"]
"""The registry, and the owner in it, of models whose names say nothing of either."""

OLLAMA_REFUSED = {
    "application/vnd.ollama.image.adapter": "an adapter (LoRA)",
    "application/vnd.ollama.image.projector": "a projector for pictures",
}

UNPACKED = "unpacked"
"""The folder in the state directory with what GGUF files were unpacked into."""

UnpackedForm = Literal["bf16", "codes"]
"""The form of an unpacked file: ``bf16`` has all weights in bfloat16, ``codes`` only those by whose
codes native code does not multiply."""

VERSION = 2
"""The version of these forms: each finds folders of its own."""


class Found(NamedTuple):
    """Describes a model of llama.cpp on this machine."""

    name: str
    """The name by which settings and commands take it."""

    files: tuple[Path, ...]
    """Its file, or the files into which it was split, in order."""


def gguf_files(model: str) -> tuple[Path, ...]:
    """Return the GGUF files that the setting ``model`` names, in order; none where it names no
    GGUF. ``model`` is a file's path, one of split files included; a folder's; ``FOLDER:PART`` or
    ``HUB_ID:PART``, of whose files one has ``PART`` in its name, such as Q4_K_M; ``ollama:NAME``;
    or ``lmstudio:PUBLISHER/NAME``.

    Raises ModelLoadError where several models, or only a part of one, are at that place.
    """
    if model.startswith(OLLAMA):
        return (_of_ollama(model.removeprefix(OLLAMA)),)
    if model.startswith(LM_STUDIO):
        name, _, part = model.removeprefix(LM_STUDIO).partition(":")
        folder = next((place / name for place in _lm_studio() if (place / name).is_dir()), None)
        if folder is None:
            known = ", ".join(str(place) for place in _lm_studio())
            raise ModelLoadError(f"LM Studio has no model {name!r} in {known}.")
        return _chosen(model, folder, part)
    path = Path(model)
    if path.suffix.lower() == SUFFIX and path.is_file():
        return _split_with(path)
    place, part = (model, "") if path.is_dir() else _parted(model)
    folder = Path(place) if Path(place).is_dir() else _of_hub(place)
    if folder is None:
        if is_of_hub(model):
            raise ModelLoadError(
                f"{model} is not on this machine. `kvlinker pull {model}` brings it."
            )
        return ()
    has_any = any(path.suffix.lower() == SUFFIX for path in folder.iterdir())
    is_other = (folder / "config.json").is_file() or not has_any
    return () if is_other and not part else _chosen(model, folder, part)


def unpacked_folder(settings: Settings, form: UnpackedForm) -> Path | None:
    """Return the folder into which the GGUF files of ``settings.model`` are, or will be, unpacked;
    None where it names none. Another version of the files has another folder, beside the first."""
    if not (files := gguf_files(settings.model)):
        return None
    place = blake3(from_anywhere(settings.model).encode()).hexdigest(8)
    content = blake3("\n".join([str(VERSION), *map(state_of, files)]).encode()).hexdigest(8)
    return settings.state_dir / UNPACKED / place / f"{content}-{form}"


def known_ggufs(folders: Iterable[Path]) -> Iterator[Found]:
    """Yield the models of llama.cpp in ``folders``, and those of Ollama and of LM Studio."""
    for folder in folders:
        for files in models_in(folder):
            yield Found(str(files[0]), files)
    for place in _ollama():
        for manifest in sorted((place / "manifests").glob("*/*/*/*")):
            *owners, tag = manifest.relative_to(place / "manifests").parts
            own = owners[2:] if owners[:2] == OLLAMA_OWN else owners[owners[0] == OLLAMA_OWN[0] :]
            name = f"{'/'.join(own)}:{tag}"
            try:
                yield Found(f"{OLLAMA}{name}", (_of_ollama(name),))
            except ModelLoadError:
                continue  # one that cannot be read is none of those that can
    for place in _lm_studio():
        for folder in sorted(place.glob("*/*")):
            models = models_in(folder)
            for files in models:
                split = SPLIT.fullmatch(files[0].name)
                part = f":{split['name'] if split else files[0].stem}" if len(models) > 1 else ""
                yield Found(f"{LM_STUDIO}{folder.relative_to(place)}{part}", files)


def models_in(folder: Path) -> list[tuple[Path, ...]]:
    """Return the files of each model of llama.cpp in a folder; of a split one those that are
    there."""
    models = _models_among(path.name for path in folder.iterdir())
    return [tuple(folder / name for name in names) for names in models.values()]


def chosen_files(model: str, names: Iterable[str], part: str) -> list[str]:
    """Return those of the file names of a repository that are the GGUF model with ``part`` in its
    name. Raises ModelLoadError where none or several are."""
    models = _models_among(names)
    wanted = {name: files for name, files in models.items() if part.lower() in name.lower()}
    exact = [name for name in wanted if _ends_with(name, part)]
    if len(exact) == 1:
        return wanted[exact[0]]
    if len(wanted) == 1:
        return next(iter(wanted.values()))
    base = model.removesuffix(f":{part}") if part else model
    if not wanted:
        raise ModelLoadError(
            f"{base} has no GGUF file with {part!r} in its name, but {_listed(models)}."
        )
    raise ModelLoadError(
        f"{base} has several GGUF files: {_listed(wanted)}. Name one by a part of its name:"
        f" {base}:Q4_K_M."
    )


def from_anywhere(model: str) -> str:
    """Return the setting ``model`` as it is right in any folder: paths in it are absolute."""
    name, part = (model, "") if Path(model).exists() else _parted(model)
    place = Path(name)
    if not place.exists():
        return model
    # A file keeps its name: those in the hub's cache are links to others whose names say nothing.
    whole = place.resolve() if place.is_dir() else place.parent.resolve() / place.name
    return f"{whole}:{part}" if part else str(whole)


def is_of_hub(model: str) -> bool:
    """Return whether a name is of a GGUF file in a repository of the hub: ``HUB_ID:PART``."""
    place, part = _parted(model)
    return bool(part) and HUB_ID.fullmatch(place) is not None and not Path(place).exists()


def state_of(path: Path) -> str:
    """Return a text that changes with a file's content. Programs can set the time of the content,
    but neither that of the last change nor the inode."""
    status = path.stat()
    times = f"{status.st_mtime_ns} {status.st_ctime_ns}"
    return f"{path.resolve()} {status.st_size} {times} {status.st_ino}"


def _models_among(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the GGUF models among file names, with their files in order, by the name that the
    files of a split one share."""
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        if name.lower().endswith(SUFFIX) and PROJECTOR not in name.lower():
            split = SPLIT.fullmatch(name)
            models.setdefault(split["name"] if split else name, []).append(name)
    return models


def _chosen(model: str, folder: Path, part: str) -> tuple[Path, ...]:
    names = [path.name for path in folder.iterdir()]
    return _split_with(folder / chosen_files(model, names, part)[0])


def _parted(model: str) -> tuple[str, str]:
    """Return a model's name without, and the part of a file's name that stands behind a colon."""
    place, _, part = model.rpartition(":")
    return (place, part) if place and "/" not in part else (model, "")


def _of_hub(name: str) -> Path | None:
    """Return the folder in the hub's cache with what was downloaded of a repository; None where
    nothing was. (The hub's own function finds only repositories that are there as a whole.)"""
    place = Path(constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}")
    try:
        return place / "snapshots" / (place / "refs" / "main").read_text().strip()
    except (OSError, ValueError):
        return None


def _ends_with(name: str, part: str) -> bool:
    """Return whether a model's name ends with ``part``: Q4_K is no name of a Q4_K_M."""
    return bool(part) and name.lower().removesuffix(SUFFIX).endswith(part.lower())


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none at all"


def _split_with(path: Path) -> tuple[Path, ...]:
    """Return the files into which the model was split that ``path`` is a file of: itself where it
    was not split. Raises ModelLoadError if one is missing, and for projectors."""
    if PROJECTOR in path.name.lower():
        raise ModelLoadError(
            f"{path} reads pictures for another model (mmproj). kvlinker reads text: name the"
            " model's own file."
        )
    split = SPLIT.fullmatch(path.name)
    if split is None:
        return (path,)
    files = tuple(
        path.with_name(f"{split['name']}-{number:05}-of-{split['count']}{SUFFIX}")
        for number in range(1, int(split["count"]) + 1)
    )
    for file in files:
        if not file.is_file():
            raise ModelLoadError(f"{path} is one of {len(files)} files, and {file} is missing.")
    return files


def _ollama() -> tuple[Path, ...]:
    """Return the folders in which Ollama keeps models: a user's, or the service's on Linux."""
    if own := os.environ.get("OLLAMA_MODELS"):
        return (Path(own),)
    return (Path.home() / ".ollama" / "models", Path("/usr/share/ollama/.ollama/models"))


def _lm_studio() -> tuple[Path, ...]:
    """Return the folders in which versions of LM Studio keep models."""
    return (Path.home() / ".lmstudio" / "models", Path.home() / ".cache" / "lm-studio" / "models")


def _of_ollama(name: str) -> Path:
    """Return the GGUF file of one of Ollama's models, by the name that ``ollama list`` shows.
    Raises ModelLoadError."""
    base, _, tag = name.partition(":")
    owners = base.split("/")
    parts = [*OLLAMA_OWN[: max(3 - len(owners), 0)], *owners, tag or "latest"]
    places = _ollama()
    manifests = [place.joinpath("manifests", *parts) for place in places]
    found = next((each for each in manifests if each.is_file()), None)
    if found is None or len(parts) != 4 or not all(map(PART_OF_NAME.fullmatch, parts)):
        raise ModelLoadError(
            f"Ollama has no model {name!r} in {' or '.join(map(str, places))}. `ollama list` names"
            " those that it has; OLLAMA_MODELS says where they are."
        )
    try:
        listed = json.loads(found.read_text())["layers"]
        layers = {layer["mediaType"]: str(layer["digest"]) for layer in listed}
        digest = layers[OLLAMA_MODEL]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ModelLoadError(f"Ollama's manifest {found} names no model.") from error
    for kind, what in OLLAMA_REFUSED.items():
        if kind in layers:
            raise ModelLoadError(f"Ollama's {name!r} has {what}, which kvlinker does not read.")
    file = found.parents[4] / "blobs" / digest.replace(":", "-")
    if not file.is_file():
        raise ModelLoadError(f"Ollama's {name!r} is not there: {file} is missing. Pull it again.")
    return file
