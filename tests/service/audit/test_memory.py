"""What the audit found outlives a process: the next one goes on as if there had been no end."""

from __future__ import annotations

import errno
import random
from pathlib import Path
from unittest.mock import Mock

import pytest

from kvlinker.base.types.answers import Usage
from kvlinker.linking import parse_policy
from kvlinker.prompting.segments import FreshSegment, Prompt
from kvlinker.service.audit import controller as controlling
from kvlinker.service.audit import figures as keeping
from kvlinker.service.audit.comparison import Comparison, RequestKind, ServedAnswer
from kvlinker.service.audit.controller import QualityController
from kvlinker.service.audit.figures import AuditFigures
from kvlinker.service.audit.ladder import Ladder, make_ladder
from kvlinker.service.audit.memory import AuditMemory, memory_path

FINGERPRINT = "ab" * 32
LADDER = make_ladder(parse_policy("query-5"), ["query-1", "query-5", "query-10", "full"])
RATES = {"query-1": 0.7, "query-5": 0.95, "query-10": 1.0, "full": 1.0}


class Watched:
    """Figures and a controller per tenant, which notice answers by ``RATES``."""

    def __init__(self, ladder: Ladder = LADDER, target: float = 0.98) -> None:
        self.figures = AuditFigures()
        self.controller = QualityController(ladder, target, per_tenant=True)

    def notice(self, answers: int, seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(answers):
            tenant = draw.choice(("anna", "bert"))
            policy = self.controller.policy(tenant).name
            agrees = draw.random() < RATES[policy]
            kind = RequestKind("1", "0-1023", draw.random() < 0.5)
            answer = ServedAnswer(
                Prompt((FreshSegment((1,)),)), policy, tenant, kind, True, (2,), (), Usage(0, 0, 1)
            )
            self.figures.add(answer, Comparison(agrees, 0.25, 0.5, None if agrees else 0))
            self.controller.note(tenant, policy, agrees)

    def remembered(self, folder: Path, fingerprint: str = FINGERPRINT) -> AuditMemory:
        return AuditMemory(
            memory_path(folder, FINGERPRINT), fingerprint, self.figures, self.controller
        )

    @property
    def state(self) -> object:
        return self.figures.state(), self.controller.state()


@pytest.mark.parametrize("answers", [1, 250, 1500])
def test_the_next_process_goes_on_where_this_one_ended(tmp_path: Path, answers: int) -> None:
    watched, anew = Watched(), Watched()
    memory = watched.remembered(tmp_path)
    watched.notice(answers, seed=1)
    memory.close()
    anew.remembered(tmp_path).close()
    assert anew.state == watched.state
    for each in (watched, anew):
        each.notice(400, seed=2)
    assert [each.after for each in anew.controller.decisions] == [
        each.after for each in watched.controller.decisions
    ]
    assert anew.figures.state() == watched.figures.state()


def test_the_file_is_written_when_something_is_new(tmp_path: Path) -> None:
    watched = Watched()
    memory, path = watched.remembered(tmp_path), memory_path(tmp_path, FINGERPRINT)
    memory.save()
    assert not path.exists()
    watched.notice(1, seed=0)
    memory.save()
    written = path.stat()
    assert written.st_mode & 0o077 == 0
    memory.close()
    assert path.stat().st_ino == written.st_ino


def test_a_newer_versions_file_is_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = memory_path(tmp_path, FINGERPRINT)
    path.parent.mkdir()
    path.write_text('{"version": 2, "unknown": {}}')
    watched = Watched()
    memory = watched.remembered(tmp_path)
    watched.notice(3, seed=0)
    memory.close()
    assert path.read_text() == '{"version": 2, "unknown": {}}'
    assert (
        "written by a newer kvlinker (version 2, this one knows up to 1), and is left alone"
        in caplog.text
    )


def test_a_full_disk_is_told_once_and_what_was_found_is_written_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    watched = Watched()
    memory, path = watched.remembered(tmp_path), memory_path(tmp_path, FINGERPRINT)
    watched.notice(1, seed=0)
    with monkeypatch.context() as patch:
        patch.setattr(
            "os.fsync", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
        )
        memory.save()
        memory.save()
    assert caplog.text.count("No space left on device") == 1
    assert list(path.parent.iterdir()) == []
    memory.close()
    assert path.exists()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"{", "cannot be read"),
        (b"[]", "cannot be read"),
        (b"\xff", "cannot be read"),
        (None, "another model's"),
    ],
    ids=["cut off", "something else", "no text", "another model's"],
)
def test_what_cannot_be_used_is_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes | None, told: str
) -> None:
    watched = Watched()
    memory = watched.remembered(tmp_path)
    watched.notice(50, seed=0)
    memory.close()
    if content is not None:
        memory_path(tmp_path, FINGERPRINT).write_bytes(content)
    anew = Watched()
    anew.remembered(
        tmp_path, FINGERPRINT if content is not None else FINGERPRINT[:-1] + "0"
    ).close()
    assert anew.state == Watched().state
    assert told in caplog.text


@pytest.mark.parametrize(
    "changed",
    [
        Watched(target=0.9),
        Watched(Ladder(LADDER.policies, 0)),
        Watched(Ladder(LADDER.policies[1:], 0)),
    ],
    ids=["target", "default policy", "ladder"],
)
def test_another_target_begins_anew_and_figures_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changed: Watched
) -> None:
    watched = Watched()
    memory = watched.remembered(tmp_path)
    watched.notice(200, seed=0)
    memory.close()
    changed.remembered(tmp_path).close()
    assert not changed.controller.state().steered
    assert changed.figures.by_policy() == watched.figures.by_policy()
    assert "begins as it is set" in caplog.text


def test_a_file_that_cannot_be_written_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "audit").write_text("no folder")
    watched = Watched()
    memory = watched.remembered(tmp_path)
    watched.notice(1, seed=0)
    memory.close()
    assert "would be lost" in caplog.text


def test_no_more_is_kept_than_the_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "MOST_GROUPS", 1)
    monkeypatch.setattr(controlling, "MOST_TENANTS", 1)
    watched, anew = Watched(), Watched()
    memory = watched.remembered(tmp_path)
    watched.notice(300, seed=0)
    memory.close()
    anew.remembered(tmp_path).close()
    (policy,) = anew.figures.by_policy()
    most = max(tally.samples for _, tally in watched.figures.state().tallies)
    assert anew.figures.by_policy()[policy].samples == most
    assert len(anew.controller.state().steered) == len(anew.figures.state().detectors) == 1
