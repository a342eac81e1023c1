"""Say how a release was made: ``make dist`` runs this last, on the folder that holds it.

It writes SLSA's provenance, version 1, as an in-toto statement: the SHA-256 of each file, the
commit, the compilers, and the pinned tools. It is not signed: the release workflow's attestation
is.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def digest(file: Path) -> str:
    return sha256(file.read_bytes()).hexdigest()


def output_of(*command: str) -> str:
    """Return what a command prints; empty if it is missing."""
    try:
        return subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()
    except OSError:
        return ""


def statement(files: list[Path], compilers: list[str]) -> dict[str, Any]:
    """Return the provenance of files that ``make dist`` made by these compilers."""
    versions = {each: output_of(each, "--version").partition("\n")[0] for each in compilers}
    pinned = [ROOT / name for name in ("requirements.txt", "requirements-tools.txt")]
    commit = output_of("git", "rev-parse", "HEAD")
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": file.name, "digest": {"sha256": digest(file)}} for file in files],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": "urn:kvlinker:make-dist:1",
                "externalParameters": {"target": "dist", "compilers": versions},
                "resolvedDependencies": [
                    {"name": "kvlinker", "digest": {"gitCommit": commit}},
                    *({"name": each.name, "digest": {"sha256": digest(each)}} for each in pinned),
                ],
            },
            "runDetails": {
                "builder": {"id": "urn:kvlinker:unsigned"},
                "metadata": {"finishedOn": datetime.now(UTC).isoformat(timespec="seconds")},
            },
        },
    }


def main(dist: Path, compilers: list[str]) -> None:
    """Write the provenance of all files in ``dist`` to a file beside them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    place = dist / f"kvlinker-{project['version']}.provenance.json"
    files = sorted(each for each in dist.iterdir() if each != place)
    place.write_text(json.dumps(statement(files, compilers), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
