"""Have the wheel for ARM answer where there is no such machine: ``python -m tools.arm_system
FOLDER`` lays Debian's system for ARM there, with Python, the wheel in ``dist/`` and all that it
needs. ``command_of`` is the command that runs Python in it, by an emulator.

It needs mmdebstrap and qemu-user. Nothing for ARM runs while the system is made: Debian's packages
are unpacked, and pip takes wheels alone. Three gigabytes are downloaded, most of them CUDA's, which
PyTorch's wheels for ARM need to be loaded.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tools.image import ROOT, SLIM, suite

LIBRARIES = ("libstdc++6", "python3")
"""Debian's packages that Python and the wheels need."""

PACKAGES = "opt/kvlinker"
"""The folder of the wheels, in the system."""

EMULATOR = ["qemu-aarch64", "-cpu", "max,sve=off"]
"""With the emulator's SVE, PyTorch's libraries end with a segmentation fault."""

PROCESSOR = {
    "proc/cpuinfo": """processor\t: 0
BogoMIPS\t: 50.00
Features\t: fp asimd atomics fphp asimdhp asimddp bf16
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x0
CPU part\t: 0xd0c
CPU revision\t: 1

""",
    "sys/devices/system/cpu/cpu0/regs/identification/midr_el1": "0x00000000410fd0c1\n",
}
"""What the kernel of a machine for ARM says of its processor, a Neoverse N1: the emulator takes the
system's files before this machine's."""


def platforms(machine: str) -> list[str]:
    """Return pip's options for all wheels that Debian 12 can load, whose C library is 2.36: to pip,
    no platform includes those of older libraries, or one under its older name."""
    names = [f"manylinux_2_{glibc}" for glibc in range(36, 4, -1)]
    return [f"--platform={name}_{machine}" for name in (*names, "manylinux2014")]


def lay_system(folder: Path) -> None:
    """Unpack Debian's packages, and describe a processor. Raises CalledProcessError."""
    system = ["--variant=extract", "--architectures=arm64", f"--include={','.join(LIBRARIES)}"]
    subprocess.run(["mmdebstrap", *SLIM, *system, suite(), str(folder)], check=True)
    for name, text in PROCESSOR.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")


def install(folder: Path) -> None:
    """Install the wheel, in the versions that the tests ran with. Raises CalledProcessError."""
    (wheel,) = (ROOT / "dist").glob("kvlinker-*_aarch64.whl")
    python = next(folder.glob("usr/lib/python3.*")).name.removeprefix("python")
    target = ["--target", str(folder / PACKAGES), "--python-version", python]
    target += platforms("aarch64")
    pinned = ["--constraint", str(ROOT / "requirements.txt")]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile"]
    command += ["--only-binary", ":all:", *target, *pinned, str(wheel)]
    subprocess.run(command, check=True)


def command_of(folder: Path, *arguments: str) -> list[str]:
    """Return what runs Python in the system."""
    return [*EMULATOR, "-L", str(folder), str(folder / "usr" / "bin" / "python3"), *arguments]


if __name__ == "__main__":
    lay_system(Path(sys.argv[1]))
    install(Path(sys.argv[1]))
