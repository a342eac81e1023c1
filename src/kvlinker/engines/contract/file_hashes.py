"""Hashes the files of models, each once: they are gigabytes."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from blake3 import blake3

from kvlinker.base.loading import Report, part_of
from kvlinker.engines.contract.gguf_files import state_of
from kvlinker.store.format.durability import replace_file

logger = logging.getLogger(__name__)

FINGERPRINTS = "fingerprints.json"
"""The file in the state directory that remembers the hashes of weight files, by path, size, times
and inode."""

SETTLED_SECONDS = 2.0
"""The age from which a file's last change tells it from later ones: file systems note times in
steps, of up to two seconds."""

HASHED_BYTES = 16 << 20
"""The bytes of a file that are hashed at a time: enough for all processors to share the work."""


def _hash_of(path: Path, report: Report) -> str:
    """Compute a file's BLAKE3 (hex), with HASHED_BYTES of it in memory at a time."""
    digest = blake3(max_threads=blake3.AUTO)
    piece = memoryview(bytearray(HASHED_BYTES))
    size, done = max(path.stat().st_size, 1), 0
    with path.open("rb", buffering=0) as file:
        while taken := file.readinto(piece):
            digest.update(piece[:taken])
            done += taken
            report("reading", min(done / size, 1.0))
    return digest.hexdigest()


def file_hashes(files: Sequence[Path], state_dir: Path, report: Report) -> list[str]:
    """Return each file's BLAKE3 (hex), from ``state_dir`` where the file is as it was: the time of
    its last change, which programs cannot set, and its inode tell that, too."""
    place = state_dir / FINGERPRINTS
    try:
        known = json.loads(place.read_text())
    except (OSError, ValueError):
        known = {}
    known = known if isinstance(known, dict) else {}
    found: dict[str, str] = {}
    hashes = []
    for index, path in enumerate(files):
        now, name = time.time(), state_of(path)
        if not isinstance(known.get(name), str):
            part = part_of(report, index / len(files), (index + 1) / len(files))
            hashes.append(_hash_of(path, part))
            if state_of(path) == name and path.stat().st_ctime < now - SETTLED_SECONDS:
                found[name] = hashes[-1]
        else:
            hashes.append(known[name])
    if found:
        try:
            place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(place, json.dumps(known | found).encode())
        except OSError as error:
            logger.warning("The model's weight files are hashed again next time: %s", error)
    return hashes
