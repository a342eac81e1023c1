"""The image, made without Docker, is small, and serves without root or a root that it could write
to."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import pytest
from tools.image import DOCKERFILE, ROOT, command_of, entry_point, environment, health_check, main

from tests.programs import README_APPLICATION, README_URL, _wait_for, output_of

MOST_BYTES = 0.9e9
"""PyTorch takes half of it; its tests, headers and symbols are left out."""
PORT = environment()["KVLINKER_PORT"]
KEYS = {"KVLINKER_API_KEYS": "none", "KVLINKER_IMPLICIT": "auto"}

pytestmark = pytest.mark.whole


@pytest.fixture(scope="module")
def image() -> Iterator[Path]:
    """The image's file system: that of ``KVLINKER_IMAGE``, or made now."""
    missing = [name for name in ("bwrap", "setpriv") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"needs {' and '.join(missing)}")
    tried = subprocess.run(
        ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "true"], capture_output=True, text=True
    )
    if tried.returncode:
        pytest.skip(f"namespaces are not allowed here: {tried.stderr.strip()}")
    if made := os.environ.get("KVLINKER_IMAGE"):
        yield Path(made)
        return
    if os.geteuid() or shutil.which("mmdebstrap") is None:
        pytest.skip("making the image needs root and mmdebstrap")
    if not list((ROOT / "dist").glob("*.whl")):
        pytest.skip("the image is made of wheels: make dist")
    with folder_of_its_own() as folder:
        main(folder / "root")
        yield folder / "root"


@pytest.fixture
def volume() -> Iterator[Path]:
    """An empty volume that belongs to the image's user."""
    with folder_of_its_own() as folder:
        if os.geteuid() == 0:
            (user,) = re.findall(r"^USER (\d+)$", DOCKERFILE.read_text(), re.MULTILINE)
            os.chown(folder, int(user), int(user))
        yield folder


@contextmanager
def folder_of_its_own() -> Iterator[Path]:
    """A folder that the image's user can reach for as long as the test runs: any pytest that starts
    meanwhile closes the folder above ``tmp_path`` to other users."""
    with TemporaryDirectory(prefix="image-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def output_in(image: Path, volume: Path, *command: str) -> str:
    """What a command prints in the image."""
    return subprocess.run(
        command_of(image, volume, KEYS, list(command)),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout


@contextmanager
def running(image: Path, volume: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The server of the image, once it answers."""
    with subprocess.Popen(command_of(image, volume, KEYS, entry_point())) as server:
        try:
            _wait_for(f"http://127.0.0.1:{PORT}/health", seconds=300)
            yield server
        finally:
            server.kill()


def test_the_image_is_small_and_has_no_compiler(image: Path) -> None:
    files = [path.lstat() for path in image.rglob("*") if not path.is_dir()]
    assert sum(status.st_blocks * 512 for status in files) <= MOST_BYTES
    assert not list(image.glob("usr/bin/*g++*"))


def test_nobody_is_root_and_nothing_is_written_but_the_volume(image: Path, volume: Path) -> None:
    code = (
        "import json, os; from pathlib import Path\n"
        "def writes(place):\n"
        "    try: Path(place, 'file').write_text(''); return True\n"
        "    except OSError: return False\n"
        "print(json.dumps([os.getuid(), *map(writes, ('/', '/opt/kvlinker', os.getcwd()))]))"
    )
    assert json.loads(output_in(image, volume, "python", "-c", code)) == [10001, False, False, True]
    assert "shipped" in output_in(image, volume, "kvlinker", "--version")


def test_the_image_answers_and_stops_when_it_is_told(image: Path, volume: Path) -> None:
    with running(image, volume) as server:
        _wait_until_ready()
        program, _ = README_APPLICATION
        answers = output_of(program.replace(README_URL, f"http://127.0.0.1:{PORT}"))
        assert re.findall(r"^(\w+):", answers, re.MULTILINE) == ["Varna", "Oslo", "Lima"]
        output_in(image, volume, *health_check())
        os.kill(_server_within(server.pid), signal.SIGTERM)
        assert server.wait(60) == 0
    assert (volume / "state" / "lock").is_file()


def _wait_until_ready(seconds: float = 600.0) -> None:
    """Wait as long as the image's health check lets a server start."""
    deadline = time.monotonic() + seconds
    while not httpx.get(f"http://127.0.0.1:{PORT}/health").is_success:
        assert time.monotonic() < deadline, "the server is not ready"
        time.sleep(1)


def _server_within(process: int) -> int:
    """The process in the namespace, which bubblewrap waits for: a signal to itself ends all."""
    while children := Path(f"/proc/{process}/task/{process}/children").read_text().split():
        process = int(children[0])
    return process
