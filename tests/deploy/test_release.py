"""What a release says of itself: one version, and the licences of what it ships."""

from __future__ import annotations

import re
import tomllib
from hashlib import sha256
from pathlib import Path

import yaml
from tools.provenance import statement

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_version_is_the_changelogs_and_the_citations() -> None:
    (newest, *_) = re.findall(r"^## \[(\d[^\]]*)\]", text_of("CHANGELOG.md"), re.MULTILINE)
    assert newest == PROJECT["version"]
    citation = yaml.safe_load(text_of("CITATION.cff"))
    assert citation["version"] == PROJECT["version"]
    assert PROJECT["license"].startswith(citation["license"])


def test_each_licence_is_shipped() -> None:
    shipped = [
        path.relative_to(ROOT).as_posix()
        for pattern in PROJECT["license-files"]
        for path in ROOT.glob(pattern)
    ]
    assert shipped == ["LICENSE", "LICENSES/PSF-2.0.txt"]
    assert "Apache License" in text_of("LICENSE")
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in text_of("LICENSES/PSF-2.0.txt")
    named = [name.removesuffix(".txt") for name in ("Apache-2.0", Path(shipped[1]).name)]
    assert PROJECT["license"] == " AND ".join(named)


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
