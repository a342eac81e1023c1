"""Names the command that installs one of kvlinker's extras where this process runs."""

from __future__ import annotations

import json
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from shlex import quote
from urllib.parse import unquote, urlsplit


def install_command(extra: str) -> str:
    """Return the command that installs ``extra``: pip's or, in a checkout, one that keeps the
    checkout's code."""
    checkout = _checkout()
    if checkout is None:
        return f"pip install 'kvlinker[{extra}]'"
    pip = Path(sys.executable).with_name("pip")
    package = checkout / "integrations" / f"kvlinker-{extra}"
    # No index has a package that is not released: pip takes it from the checkout.
    beside = f"-e {quote(str(_near(package)))} " if package.is_dir() else ""
    return f"{quote(str(_near(pip)))} install {beside}-e '{_near(checkout)}[{extra}]'"


def _checkout() -> Path | None:
    """Return the folder from which kvlinker was installed to be edited; None if it was not."""
    try:
        origin = json.loads(distribution("kvlinker").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        return None
    if not origin.get("dir_info", {}).get("editable"):
        return None
    return Path(unquote(urlsplit(origin["url"]).path))


def _near(path: Path) -> Path:
    """Return the path from the working directory, for what is in it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
