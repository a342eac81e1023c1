"""Programs that the documentation shows, and servers in processes of their own, as users start
them."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path

import httpx

README = (Path(__file__).parents[1] / "README.md").read_text()
README_EXAMPLES: list[tuple[str, str]] = re.findall(
    r"```python\n(.*?)```.*?```\n(.*?)```", README, re.DOTALL
)
"""Programs, and what each prints, as the README shows them."""
README_APPLICATION, README_CLIENT, README_LIBRARY = README_EXAMPLES
"""An application that knows nothing of kvlinker, a client that names context caches, which both
speak to a server at ``README_URL``, and a use of the library."""
README_URL = "http://localhost:8000"


def output_of(program: str) -> str:
    """What the program prints; it runs in this process, in a namespace of its own, and its
    exceptions are raised."""
    with redirect_stdout(StringIO()) as printed:
        exec(compile(program, "<documentation>", "exec"), {"__name__": "__main__"})
    return printed.getvalue()


@contextmanager
def kvlinker_serve(arguments: Sequence[str], environment: Mapping[str, str]) -> Iterator[str]:
    """The URL of ``kvlinker serve`` on a free port, with these arguments."""
    command = [str(Path(sys.executable).with_name("kvlinker")), "serve", "--port", "0", *arguments]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as server:
        assert server.stdout is not None
        try:
            url = next(
                found[1]
                for line in server.stdout
                if (found := re.search(r"address\s+(http://[\d.:]+)", line))
            )
            _wait_for(f"{url}/health")
            yield url
        finally:
            server.terminate()


def _wait_for(url: str, seconds: float = 60.0) -> None:
    """Wait until something answers: a server says its address before it listens."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            httpx.get(url)
            return
        except httpx.ConnectError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
