"""The house stays one that a stranger finds a way through: short files, and folders of few."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = [
    file
    for folder in ("src", "lab/src")
    for ending in ("py", "cpp", "h", "js", "css", "html")
    for file in (ROOT / folder).rglob(f"*.{ending}")
]
MOST_LINES = 400
MOST_MODULES = 15


def test_no_file_is_long() -> None:
    lengths = {file: len(file.read_text().splitlines()) for file in CODE}
    assert len(lengths) > 500
    long = {file.name: length for file, length in lengths.items() if length > MOST_LINES}
    assert not long, f"files have at most {MOST_LINES} lines: divide them"


def test_no_folder_of_the_product_has_many_modules() -> None:
    folders = {file.parent for file in (ROOT / "src").rglob("*.py")}
    modules = {
        folder: [each for each in folder.glob("*.py") if each.name != "__init__.py"]
        for folder in folders
    }
    full = {folder.name: len(each) for folder, each in modules.items() if len(each) > MOST_MODULES}
    assert not full, f"folders have at most {MOST_MODULES} modules: make folders in them"
