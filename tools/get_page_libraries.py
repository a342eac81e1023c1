"""Gets the libraries of the page anew, as npm has them: each file, and its licence.

Run it after a change of a version below, and look at what changed:
``python tools/get_page_libraries.py``
"""

from __future__ import annotations

import subprocess
import tarfile
import tempfile
from pathlib import Path

LIBRARIES = {
    "highlight": ("@highlightjs/cdn-assets@11.12.0", "es/highlight.min.js"),
    "marked": ("marked@18.2.1", "lib/marked.esm.js"),
    "temml": ("temml@0.13.5", "dist/temml.mjs"),
}
"""The packages by the folders of their files: name and version, and the file that is loaded."""

PLACE = Path(__file__).parents[1] / "src/kvlinker/doors/http/static/libraries"


def get(folder: str, package: str, file: str) -> None:
    """Put the file of a package, and its licence, into a folder of the page's libraries."""
    with tempfile.TemporaryDirectory() as scratch:
        command = ["npm", "pack", "--silent", "--pack-destination", scratch, package]
        packed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
        with tarfile.open(Path(scratch) / packed) as archive:
            for path in (file, "LICENSE"):
                content = archive.extractfile(f"package/{path}")
                assert content is not None
                target = PLACE / folder / Path(path).name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content.read())


if __name__ == "__main__":
    for folder, (package, file) in LIBRARIES.items():
        get(folder, package, file)
