"""What a release says of itself: one version, and the licences of what it ships."""

from __future__ import annotations

import re
import tomllib
from hashlib import sha256
from pathlib import Path

import yaml
from tools.provenance import statement

ROOT = Path(__file__).parents[2]
LIBRARIES = "src/kvlinker/doors/http/static/libraries"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_version_is_the_changelogs_and_the_citations() -> None:
    (newest, *_) = re.findall(r"^## \[(\d[^\]]*)\]", text_of("CHANGELOG.md"), re.MULTILINE)
    assert newest == PROJECT["version"]
    citation = yaml.safe_load(text_of("CITATION.cff"))
    assert citation["version"] == PROJECT["version"]
    assert PROJECT["license"].startswith(citation["license"])


def test_packages_that_join_the_core_are_of_its_version() -> None:
    """They depend on it in this version, and its extras bring them in it."""
    version = PROJECT["version"]
    extras = " ".join(
        needed for each in PROJECT["optional-dependencies"].values() for needed in each
    )
    for file in (ROOT / "integrations").glob("kvlinker-*/pyproject.toml"):
        package = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        assert package["version"] == version
        assert f"kvlinker=={version}" in package["dependencies"]
        named = set(re.findall(rf"{package['name']}(?:\[[\w-]+\])?(==\S+)?", extras))
        assert named == {f"=={version}"}


def test_each_licence_is_shipped() -> None:
    shipped = [
        path.relative_to(ROOT).as_posix()
        for pattern in PROJECT["license-files"]
        for path in ROOT.glob(pattern)
    ]
    kinds = {
        "LICENSE": "Apache License",
        "LICENSES/PSF-2.0.txt": "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2",
        f"{LIBRARIES}/highlight/LICENSE": "BSD 3-Clause License",
        f"{LIBRARIES}/marked/LICENSE": "Permission is hereby granted, free of charge",
        f"{LIBRARIES}/temml/LICENSE": "Permission is hereby granted, free of charge",
    }
    assert sorted(shipped) == sorted(kinds)
    for name, words in kinds.items():
        assert words.lower() in text_of(name).lower(), name
    assert PROJECT["license"] == "Apache-2.0 AND PSF-2.0 AND MIT AND BSD-3-Clause"


def test_provenance_names_each_file_by_its_content(tmp_path: Path) -> None:
    file = tmp_path / "kvlinker.whl"
    file.write_bytes(b"content")
    made = statement([file], ["no-such-compiler"])
    assert made["subject"] == [
        {"name": "kvlinker.whl", "digest": {"sha256": sha256(b"content").hexdigest()}}
    ]
    assert made["predicate"]["buildDefinition"]["externalParameters"]["compilers"] == {
        "no-such-compiler": ""
    }
