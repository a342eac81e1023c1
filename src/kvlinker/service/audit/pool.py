"""Pools the findings of servers that share a catalog: each takes all samples in the order in which
they were written there, and so has the findings of one server with all of them."""

from __future__ import annotations

import json
import logging
import secrets
import threading
from collections import deque
from dataclasses import asdict, dataclass

from pydantic import TypeAdapter

from kvlinker.base.errors import StoreError
from kvlinker.service.audit.findings import Findings, FindingsState, Sample
from kvlinker.store.catalog.audit import AuditLog, AuditSample

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
"""The version of the written format. Whatever changes what a state means raises it, the
alternatives of tests among them."""

REFRESH_SECONDS = 2.0
"""The seconds between two reads of other servers' findings: so long may two servers follow
different settings."""

KEPT_SAMPLES = 256
"""The samples that are kept one by one; more are replaced by what they came to."""

MOST_UNWRITTEN = 10_000
"""The samples that wait for a catalog that does not answer; older ones are lost."""


@dataclass(frozen=True, slots=True)
class _State:
    """A state as it is written."""

    version: int
    findings: FindingsState


_STATES, _SAMPLES = TypeAdapter(_State), TypeAdapter(Sample)


class AuditPool:
    """Writes this server's samples, and takes everybody's. ``add`` and ``refresh`` may be called
    from any thread. Nothing is raised because of the catalog: while it does not answer, samples
    wait."""

    def __init__(self, log: AuditLog, fingerprint: str, findings: Findings) -> None:
        """Begin with the kept findings on the model of this ``fingerprint``; ``findings`` have seen
        nothing yet."""
        self.name: str | None = None
        """The name of the pool: servers with the same name have the same findings."""

        self._log = log
        self._fingerprint = fingerprint
        self._findings = findings
        self._server = secrets.token_hex(8)
        self._seen = self._kept = 0
        self._waits = False
        self._complained: set[str] = set()
        self._unwritten: deque[Sample] = deque(maxlen=MOST_UNWRITTEN)
        self._lock = threading.Lock()  # held while samples are written and taken
        self._closing = threading.Event()
        self.refresh()
        self._thread = threading.Thread(target=self._run, name="kvlinker-audit-pool", daemon=True)
        self._thread.start()

    def add(self, sample: Sample) -> None:
        """Enqueue a sample, which is written soon, and taken then. Does not wait."""
        self._unwritten.append(sample)

    def refresh(self) -> None:
        """Write waiting samples, and take those that were written since the last time."""
        with self._lock:
            try:
                self._write()
                self._read()
            except StoreError as error:
                if not self._waits:
                    logger.warning("What audits find waits for the catalog: %s", error.message)
                self._waits = True
            else:
                self._waits = False

    def close(self) -> None:
        """Write waiting samples; close the sources of samples before. Idempotent."""
        self._closing.set()
        self._thread.join()
        self.refresh()

    def _run(self) -> None:
        while not self._closing.wait(REFRESH_SECONDS):
            self.refresh()

    def _write(self) -> None:
        if self.name is None:
            self._log.begin(self._fingerprint)
        waiting = list(self._unwritten)
        if waiting:
            contents = [json.dumps(asdict(sample)) for sample in waiting]
            self._log.append(self._fingerprint, self._server, contents)
            for _ in waiting:
                self._unwritten.popleft()

    def _read(self) -> None:
        part = self._log.since(self._fingerprint, self._seen)
        self.name = part.pool
        if part.upto > self._seen:
            self._seen = self._kept = part.upto
            if part.state is not None:
                self._restore(part.state)
        self._kept = max(self._kept, part.upto)
        for sample in part.samples:
            self._take(sample)
            self._seen = sample.number
        if self._seen - self._kept >= KEPT_SAMPLES:
            state = _State(FORMAT_VERSION, self._findings.state())
            self._log.replace(self._fingerprint, self._seen, json.dumps(asdict(state)))
            self._kept = self._seen

    def _restore(self, text: str) -> None:
        try:
            content = json.loads(text)
            if content["version"] != FORMAT_VERSION:
                self._complain("The audit starts from zero: the catalog has another version's.")
                return
            state = _STATES.validate_python(content)
        except (ValueError, KeyError, TypeError) as error:
            self._complain(f"The audit starts from zero: the catalog's cannot be read: {error}")
            return
        if not self._findings.restore(state.findings):
            self._complain(
                "The default policy begins as it is set: its ladder or its target was another one"
                " before."
            )

    def _take(self, sample: AuditSample) -> None:
        try:
            content = _SAMPLES.validate_python(json.loads(sample.content))
        except ValueError as error:
            self._complain(f"A sample of the audit cannot be read: {error}")
            return
        self._findings.take(content, own=sample.server == self._server)

    def _complain(self, message: str) -> None:
        """Log a warning, but each only once."""
        if message not in self._complained:
            self._complained.add(message)
            logger.warning("%s", message)
