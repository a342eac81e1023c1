"""Follow the steps of ``deploy/Dockerfile`` without Docker: ``python tools/image.py FOLDER`` makes
the image's file system there, with Debian's packages and the wheels in ``dist/``.

It needs root, mmdebstrap and bubblewrap. Packages come from where this machine's apt and pip find
them. ``command_of`` is the command that runs the image as the Dockerfile says.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import ssl
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
OF_THIS_MACHINE = ("/etc/apt", "/etc/pip.conf", "/etc/resolv.conf", "/etc/xdg")
"""What says from where packages come, and is seen while the image is built, where it exists."""

CERTIFICATES = "/run/certificates.crt"
"""Where this machine's certificates are seen then: the image's own are installed meanwhile."""

CERTIFICATE_VARIABLES = ("PIP_CERT", "REQUESTS_CA_BUNDLE")
"""By which pip is told where they are; the second one, where a machine sets it, is obeyed first."""

SLIM = [
    "--variant=minbase",
    "--include=usr-is-merged",
    "--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr",
    *(f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "info", "locale", "man")),
]
"""What makes mmdebstrap's system like Docker's slim one: folders merged without Perl, and neither
pages of manuals nor translations."""

SYSTEM = ["--die-with-parent", "--dev", "/dev", "--proc", "/proc"]


def instructions() -> list[tuple[str, str]]:
    """Return the Dockerfile's instructions as pairs of keyword and argument, comments and continued
    lines resolved."""
    lines = DOCKERFILE.read_text(encoding="utf-8").splitlines()
    text = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
    logical = re.sub(r"\\\n\s*", "", text).splitlines()
    return [
        (word, rest.strip()) for word, _, rest in (line.partition(" ") for line in logical) if word
    ]


def suite() -> str:
    """Return the name of the release of Debian that the image starts from."""
    return dict(instructions())["FROM"].partition(":")[2].removesuffix("-slim")


def environment() -> dict[str, str]:
    """Return the variables that the image sets."""
    words = (each for word, rest in instructions() if word == "ENV" for each in shlex.split(rest))
    return dict(word.split("=", 1) for word in words)


def health_check() -> list[str]:
    """Return the command that says whether the server lives."""
    (check,) = (rest for word, rest in instructions() if word == "HEALTHCHECK")
    return list(json.loads(check.partition("CMD ")[2]))


def entry_point() -> list[str]:
    """Return the command that the image runs."""
    by_word = dict(instructions())
    return [*json.loads(by_word["ENTRYPOINT"]), *json.loads(by_word["CMD"])]


def command_of(
    folder: Path, volume: Path, variables: Mapping[str, str], command: list[str]
) -> list[str]:
    """Return what runs a command in the image: as its user, with a read-only root, a volume, and
    ``/tmp`` in memory."""
    by_word = dict(instructions())
    given = [
        word for pair in (environment() | dict(variables)).items() for word in ("--setenv", *pair)
    ]
    places = ["--ro-bind", str(folder), "/", *SYSTEM, "--tmpfs", "/tmp"]
    places += ["--bind", str(volume), by_word["VOLUME"], "--chdir", by_word["WORKDIR"]]
    user = by_word["USER"]
    # Root has to become the user first: in a namespace of its own, it would only be called so.
    as_user = ["setpriv", "--reuid", user, "--regid", user, "--clear-groups"]
    isolated = ["bwrap", "--unshare-all", "--share-net", "--uid", user, "--gid", user]
    isolated += ["--cap-drop", "ALL", *places, "--clearenv", *given, *command]
    return isolated if os.geteuid() else [*as_user, *isolated]


def run_step(folder: Path, step: str, variables: Mapping[str, str]) -> None:
    """Run a ``RUN`` instruction in the image. Raises CalledProcessError."""
    mounts: list[str] = []
    while found := re.match(r"--mount=(\S+)\s+", step):
        options = dict(option.partition("=")[::2] for option in found[1].split(","))
        mounts += ["--ro-bind", str(ROOT / options.get("source", "")), options["target"]]
        step = step[found.end() :]
    seen = [word for place in _places_of_packages() for word in ("--ro-bind", place, place)]
    if certificates := ssl.get_default_verify_paths().cafile:
        seen += ["--ro-bind", certificates, CERTIFICATES]
        for name in CERTIFICATE_VARIABLES:
            seen += ["--setenv", name, CERTIFICATES]
    given = [word for pair in variables.items() for word in ("--setenv", *pair)]
    isolated = ["bwrap", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--cap-add", "ALL"]
    isolated += ["--bind", str(folder), "/", *SYSTEM, *seen, *mounts, *given]
    subprocess.run([*isolated, "/bin/sh", "-ec", step], check=True)


def _places_of_packages() -> Iterator[str]:
    """Yield the files and folders that say from where packages come, and those that pip's settings
    name."""
    settings = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    named = re.findall(r"(?:file://)?(/[\w/.-]+)", settings)
    for place in dict.fromkeys([*OF_THIS_MACHINE, *named]):
        if os.path.exists(place) and place != "/" and not place.startswith("/etc/ssl/"):
            yield place


def main(folder: Path) -> None:
    """Make the image's file system in ``folder``."""
    variables: dict[str, str] = {}
    for word, rest in instructions():
        if word == "FROM":
            subprocess.run(["mmdebstrap", *SLIM, suite(), str(folder)], check=True)
        elif word == "ARG":
            name, _, default = rest.partition("=")
            variables[name] = os.environ.get(name, default)
        elif word == "RUN":
            run_step(folder, rest, variables)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
