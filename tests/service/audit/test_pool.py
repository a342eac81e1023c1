"""Servers that share a catalog know what one server with all of their samples would know."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlinker.base.errors import CatalogUnavailableError
from kvlinker.base.events import AgreementFell, Events
from kvlinker.linking import parse_policy
from kvlinker.service.audit import controller as controlling
from kvlinker.service.audit import figures as keeping
from kvlinker.service.audit import pool as pooling
from kvlinker.service.audit.comparison import Comparison, RequestKind
from kvlinker.service.audit.controller import Ladder, QualityController, make_ladder
from kvlinker.service.audit.findings import Findings, Sample
from kvlinker.service.audit.pool import AuditPool
from kvlinker.store import Catalog
from tests.properties import examples

FINGERPRINT = "ab" * 32
LADDER = make_ladder(parse_policy("query-5"), ["query-1", "query-5", "query-10", "full"])
RATES = {"query-1": 0.7, "query-5": 0.95, "query-10": 1.0, "full": 1.0}


@pytest.fixture(autouse=True)
def no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools look at the catalog when a test says so."""
    monkeypatch.setattr(pooling, "REFRESH_SECONDS", 3600.0)


class Server:
    """Figures, a controller per tenant, and a pool."""

    def __init__(
        self,
        catalog: Catalog,
        fingerprint: str = FINGERPRINT,
        ladder: Ladder = LADDER,
        target: float = 0.98,
    ) -> None:
        self.events: list[object] = []
        events = Events()
        events.subscribe(self.events.append)
        self.findings = findings(ladder, target, events)
        self.pool = AuditPool(catalog.audit, fingerprint, self.findings)

    def answer(self, draw: random.Random, number: int) -> Sample:
        """An answer under the default policy of now, which is pooled."""
        tenant = draw.choice(("anna", "bert"))
        assert self.findings.controller is not None
        policy = self.findings.controller.policy(tenant).name
        agrees = draw.random() < RATES[policy]
        kind = RequestKind("1", "0-1023", draw.random() < 0.5)
        found = Comparison(agrees, 0.25, 0.5, None if agrees else 0) if policy != "full" else None
        sample = Sample(float(number), tenant, policy, kind, found)
        self.pool.add(sample)
        return sample

    def notice(self, answers: int, seed: int) -> None:
        draw = random.Random(seed)
        for number in range(answers):
            self.answer(draw, number)
            self.pool.refresh()


def known(found: Findings) -> object:
    """What is known, whatever the order of what has as many answers."""
    state = found.state()
    return (
        dict(state.figures.tallies),
        state.figures.detectors,
        state.figures.drifts,
        state.controller,
    )


def findings(
    ladder: Ladder = LADDER, target: float = 0.98, events: Events | None = None
) -> Findings:
    controller = QualityController(ladder, target, per_tenant=True)
    return Findings(events or Events(), controller=controller)


@pytest.fixture(params=["sqlite", "postgresql"])
def catalog(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Catalog]:
    place: Path | str = tmp_path / "catalog.sqlite"
    if request.param == "postgresql":
        place = request.getfixturevalue("postgres_server").new_database()
    with closing(Catalog(place)) as made:
        yield made


STEPS = st.lists(
    st.tuples(
        st.integers(0, 2),  # the server
        st.sampled_from(["answer", "answer", "answer", "refresh", "restart"]),
        st.integers(1, 40),  # answers
    ),
    min_size=1,
    max_size=30,
)


@given(steps=STEPS, seed=st.integers(0, 1000), kept=st.sampled_from([1, 7, 10_000]))
@examples(25)
def test_servers_together_know_what_one_would_know(
    tmp_path_factory: pytest.TempPathFactory, steps: list[Any], seed: int, kept: int
) -> None:
    draw, written = random.Random(seed), 0
    alone = findings()
    with (
        pytest.MonkeyPatch.context() as patch,
        closing(Catalog(tmp_path_factory.mktemp("pool") / "catalog.sqlite")) as catalog,
    ):
        patch.setattr(pooling, "KEPT_SAMPLES", kept)
        servers = [Server(catalog) for _ in range(3)]
        waiting: list[list[Sample]] = [[], [], []]
        for number, what, count in steps:
            if what == "answer":
                for _ in range(count):
                    written += 1
                    waiting[number].append(servers[number].answer(draw, written))
                continue
            servers[number].pool.refresh()
            for sample in waiting[number]:
                alone.take(sample)
            waiting[number].clear()
            if what == "restart":
                servers[number].pool.close()
                servers[number] = Server(catalog)
            assert known(servers[number].findings) == known(alone)
        for server, left in zip(servers, waiting, strict=True):
            server.pool.close()
            for sample in left:
                alone.take(sample)
        for server in servers:
            server.pool.refresh()
            assert known(server.findings) == known(alone)
        assert len({server.pool.name for server in servers}) == 1


def test_the_next_process_goes_on_where_this_one_ended(catalog: Catalog) -> None:
    server = Server(catalog)
    server.notice(600, seed=1)
    server.pool.close()
    anew = Server(catalog)
    assert known(anew.findings) == known(server.findings)
    assert anew.findings.figures.by_policy()
    other = Server(catalog, fingerprint="cd" * 32)
    assert not other.findings.figures.by_policy(), "another model's"
    assert other.pool.name != anew.pool.name
    for each in (anew, other):
        each.pool.close()


def test_two_servers_never_follow_two_settings_for_longer_than_a_refresh(catalog: Catalog) -> None:
    ladder = Ladder(LADDER.policies, 0)
    one, two = Server(catalog, ladder=ladder), Server(catalog, ladder=ladder)
    draw, changes = random.Random(3), 0
    for number in range(200):
        (one, two)[number % 2].answer(draw, number)
        for server in (one, two):
            server.pool.refresh()
        for server in (one, two):
            server.pool.refresh()
        steered = [server.findings.controller for server in (one, two)]
        assert steered[0] is not None
        assert steered[1] is not None
        assert steered[0].state() == steered[1].state()
        changes = len(steered[0].decisions)
    assert changes > 0
    for server in (one, two):
        server.pool.close()


def test_a_fall_is_told_by_the_server_that_saw_it(catalog: Catalog) -> None:
    one, two = Server(catalog), Server(catalog)
    kind = RequestKind("1", "0-1023", implicit=False)
    good = Sample(0.0, "anna", "naive", kind, Comparison(True, 0.1, 0.1, None))
    for agrees in [True] * 200 + [False] * 30:
        bad = replace(good, found=Comparison(False, 0.1, 0.1, 0))
        one.pool.add(good if agrees else bad)
    for server in (one, two):
        server.pool.refresh()
    assert [type(event) for event in one.events] == [AgreementFell]
    assert two.events == []
    assert two.findings.figures.drift("naive").alarms == 1
    for server in (one, two):
        server.pool.close()


def test_samples_wait_for_a_catalog_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(Catalog(tmp_path / "catalog.sqlite")) as catalog:
        server = Server(catalog)

        def gone(*_: object) -> None:
            raise CatalogUnavailableError("It is gone.")

        with monkeypatch.context() as patch:
            patch.setattr(catalog.audit, "append", gone)
            server.notice(3, seed=0)
        assert caplog.text.count("What audits find waits for the catalog: It is gone.") == 1
        assert not server.findings.figures.by_policy()
        server.pool.close()
        assert sum(each.samples for each in server.findings.figures.by_policy().values()) == 3


def state_of(**detector: object) -> str:
    """A state as it is written, with a drift detector of these fields."""
    figures = {"tallies": [], "detectors": {"query-1": detector}, "drifts": {}}
    return json.dumps({"version": 1, "findings": {"figures": figures, "controller": None}})


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
        ('{"version": 2}', "another version's"),
        (state_of(alarms=0, seen=150, successes=150, bound=0.96), "cannot be read"),
        (state_of(alarms=0, seen=150, successes=150, bound=None, logs=[]), "cannot be read"),
    ],
)
def test_what_cannot_be_used_is_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str, told: str
) -> None:
    with closing(Catalog(tmp_path / "catalog.sqlite")) as catalog:
        server = Server(catalog)
        server.notice(5, seed=0)
        catalog.audit.append(FINGERPRINT, "other", ["no sample"])
        catalog.audit.replace(FINGERPRINT, 5, content)
        anew = Server(catalog)
        assert not anew.findings.figures.by_policy()
        assert told in caplog.text
        assert "A sample of the audit cannot be read" in caplog.text
        for each in (server, anew):
            each.pool.close()


@pytest.mark.parametrize(
    ("ladder", "target"),
    [
        (LADDER, 0.9),
        (Ladder(LADDER.policies, 0), 0.98),
        (Ladder(LADDER.policies[1:], 0), 0.98),
    ],
    ids=["target", "default policy", "ladder"],
)
def test_another_target_begins_anew_and_figures_go_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    ladder: Ladder,
    target: float,
) -> None:
    monkeypatch.setattr(pooling, "KEPT_SAMPLES", 1)
    with closing(Catalog(tmp_path / "catalog.sqlite")) as catalog:
        server = Server(catalog)
        server.notice(200, seed=0)
        changed = Server(catalog, ladder=ladder, target=target)
        assert changed.findings.controller is not None
        assert not changed.findings.controller.state().steered
        assert changed.findings.figures.by_policy() == server.findings.figures.by_policy()
        assert "begins as it is set" in caplog.text
        for each in (server, changed):
            each.pool.close()


def test_no_more_is_kept_than_the_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "MOST_GROUPS", 1)
    monkeypatch.setattr(controlling, "MOST_TENANTS", 1)
    monkeypatch.setattr(pooling, "KEPT_SAMPLES", 100)
    with closing(Catalog(tmp_path / "catalog.sqlite")) as catalog:
        server = Server(catalog)
        server.notice(300, seed=0)
        anew = Server(catalog)
        (policy,) = anew.findings.figures.by_policy()
        most = max(tally.samples for _, tally in server.findings.figures.state().tallies)
        assert anew.findings.figures.by_policy()[policy].samples == most
        assert anew.findings.controller is not None
        assert len(anew.findings.controller.state().steered) == 1
        rows = catalog.audit.since(FINGERPRINT, 0)
        assert (rows.upto, rows.samples) == (300, ())
        for each in (server, anew):
            each.pool.close()
