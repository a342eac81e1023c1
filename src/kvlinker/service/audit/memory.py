"""Keeps what the audit found, and where the default policy is, in a file that the next process goes
on with."""

from __future__ import annotations

import json
import logging
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from kvlinker.service.audit.controller import ControllerState, QualityController
from kvlinker.service.audit.figures import AuditFigures, FiguresState
from kvlinker.store.format.durability import replace_file

logger = logging.getLogger(__name__)

FOLDER = "audit"
"""The folder in the state directory that the files are kept in, one for each model."""

FORMAT_VERSION = 1
"""The version of the files. Whatever changes what a state means raises it, the alternatives of
tests among them."""

SAVE_SECONDS = 30.0
"""The seconds between two looks at whether something is to be written."""

_FINGERPRINT_CHARACTERS = 16


@dataclass(frozen=True, slots=True)
class _Content:
    """The content of a file."""

    version: int
    fingerprint: str
    """The engine's fingerprint of the model, whole."""

    figures: FiguresState
    controller: ControllerState | None


_CONTENTS = TypeAdapter(_Content)


def memory_path(state_dir: Path, fingerprint: str) -> Path:
    """Return where the audit of the model of this fingerprint is kept."""
    return state_dir / FOLDER / f"{fingerprint[:_FINGERPRINT_CHARACTERS]}.json"


class AuditMemory:
    """Goes on with what a file tells, and writes it again every ``SAVE_SECONDS`` where something
    has changed.

    A file that is damaged, or another model's, counts as none; a newer version's is left alone, and
    nothing is written. Nothing is raised because of the file.
    """

    def __init__(
        self,
        path: Path,
        fingerprint: str,
        figures: AuditFigures,
        controller: QualityController | None,
    ) -> None:
        """Read the file at ``path`` into ``figures`` and ``controller``, which have seen nothing
        yet."""
        self._path = path
        self._complained = self._newer = False
        self._fingerprint = fingerprint
        self._figures = figures
        self._controller = controller
        self._read()
        self._written = self._content()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvlinker-audit-memory", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write what has changed; close what notes answers before. Idempotent."""
        self._closing.set()
        self._thread.join()
        self.save()

    def save(self) -> None:
        """Write the file if something has changed."""
        content = self._content()
        if self._newer or content == self._written:
            return
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(self._path, content.encode())
            self._written = content
            self._complained = False
        except OSError as error:
            if not self._complained:
                self._complained = True
                logger.warning(
                    "What the audit found would be lost if the server ended now: %s. It is tried"
                    " again every %.0f s.",
                    error,
                    SAVE_SECONDS,
                )

    def _run(self) -> None:
        while not self._closing.wait(SAVE_SECONDS):
            self.save()

    def _read(self) -> None:
        try:
            content = json.loads(self._path.read_text())
            if content["version"] > FORMAT_VERSION:
                self._newer = True
                logger.warning(
                    "The audit begins anew, and is not kept: %s was written by a newer kvlinker"
                    " (version %s, this one knows up to %d), and is left alone.",
                    self._path,
                    content["version"],
                    FORMAT_VERSION,
                )
                return
            contents = _CONTENTS.validate_python(content)
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("The audit begins anew, for %s cannot be read: %s", self._path, error)
            return
        if (contents.version, contents.fingerprint) != (FORMAT_VERSION, self._fingerprint):
            logger.warning(
                "The audit begins anew, for %s is another version's, or another model's.",
                self._path,
            )
            return
        self._figures.restore(contents.figures)
        if self._controller is None or contents.controller is None:
            return
        if not self._controller.restore(contents.controller):
            logger.warning(
                "The default policy begins as it is set: its ladder or its target was another one"
                " before."
            )

    def _content(self) -> str:
        steering = None if self._controller is None else self._controller.state()
        return json.dumps(
            asdict(_Content(FORMAT_VERSION, self._fingerprint, self._figures.state(), steering))
        )
