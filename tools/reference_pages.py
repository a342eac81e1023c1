"""Write the pages of the API reference, one for each module of the core and of the packages
that join it: ``make docs`` runs this first.

A page holds the module's name for mkdocstrings, which fills in what the docstrings say. The first
page lists all modules with the first sentence of each one's docstring. Nothing of the package is
imported.
"""

from __future__ import annotations

import ast
import re
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = (
    ROOT / "src" / "kvlinker",
    ROOT / "integrations" / "kvlinker-fleet" / "kvlinker_fleet",
    ROOT / "integrations" / "kvlinker-vllm" / "kvlinker_vllm",
)
"""The core, and the packages that join it."""
REFERENCE = ROOT / "docs" / "reference"


def page_of(file: Path, package: Path) -> Path:
    """Return where a module's page lies below the reference; that of a package is the first page of
    its folder. The core's pages lie at the top."""
    top = package if package.name == "kvlinker" else package.parent
    return file.relative_to(top).with_name(f"{file.stem.replace('__init__', 'index')}.md")


def name_of(page: Path) -> str:
    """Return the dotted name of the module that a page is about."""
    parts = page.with_suffix("").parts
    if parts[0] not in {package.name for package in PACKAGES}:
        parts = ("kvlinker", *parts)
    return ".".join(parts).removesuffix(".index")


def first_sentence(file: Path) -> str:
    """Return the first sentence of a module's docstring, or nothing where it has none."""
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return re.split(r"(?<=[.!?])\s", " ".join(docstring.split("\n\n")[0].split()))[0]


def main() -> None:
    shutil.rmtree(REFERENCE, ignore_errors=True)
    files = {page_of(file, package): file for package in PACKAGES for file in package.rglob("*.py")}
    listed = []
    for page in sorted(files, key=name_of):
        name = name_of(page)
        indent = "    " * (name.count(".") - name.startswith("kvlinker."))
        listed.append(f"{indent}- [`{name}`]({page}): {first_sentence(files[page])}")
        text = f"---\ntitle: {name.rpartition('.')[2]}\n---\n\n# {name}\n\n::: {name}\n"
        (REFERENCE / page).parent.mkdir(parents=True, exist_ok=True)
        (REFERENCE / page).write_text(text, encoding="utf-8")
    modules = "\n".join(listed[1:])
    first = (
        f"---\ntitle: Reference\n---\n\n# Reference\n\n## Modules\n\n{modules}\n\n##"
        " kvlinker\n\n::: kvlinker\n"
    )
    (REFERENCE / "index.md").write_text(first, encoding="utf-8")


if __name__ == "__main__":
    main()
