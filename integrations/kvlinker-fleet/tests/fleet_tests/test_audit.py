"""GET /v1/audit of a fleet: one verdict, whether servers share a catalog or not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.doors.http.serving import Served, serving, tiny_model, tiny_settings
from tests.properties import examples
from tests.waiting import wait_until

from fleet_tests.test_routing_over_http import TEXTS, asked, routing
from kvlinker.base.events import Events
from kvlinker.doors.http.fields.audit import AuditObject, KindAudit, PolicyAudit, PolicySetting
from kvlinker.llm import LLM
from kvlinker.service.audit.comparison import Comparison, RequestKind
from kvlinker.service.audit.figures import AuditFigures
from kvlinker.service.audit.findings import Findings, Sample
from kvlinker_fleet.audit import merge_reports

AUDITED: dict[str, Any] = {"audit": "100%", "quality_target": "98%", "disk_space": 0}
KEYS = {"api_keys": "anna,bert", "admin_keys": "root"}

SAMPLES = st.builds(
    lambda policy, tenant, chunks, agrees, kl: Sample(
        1.0,
        tenant,
        policy,
        RequestKind(chunks, "0-1023", implicit=False),
        Comparison(agrees, kl, kl, None if agrees else 0),
    ),
    st.sampled_from(["naive", "query-5"]),
    st.sampled_from(["anna", "bert"]),
    st.sampled_from(["1", "2-4"]),
    st.booleans(),
    st.none() | st.floats(0, 10),
)


def told(samples: list[Sample], pool: str | None) -> AuditObject:
    findings = Findings(Events())
    for sample in samples:
        findings.take(sample)
    figures: AuditFigures = findings.figures
    return AuditObject(
        model="tiny",
        pool=pool,
        share=0.5,
        pending=1,
        skipped={"empty": 2},
        policies=[
            PolicyAudit.of(name, tally, figures.drift(name))
            for name, tally in figures.by_policy().items()
        ],
        kinds=[
            KindAudit.of(name, kind, tally) for (name, kind), tally in figures.by_kind().items()
        ],
        tenants=None,
        setting=PolicySetting(policy="naive", target=None, ladder=None),
        decisions=[],
    )


@given(st.lists(st.lists(SAMPLES, max_size=30), min_size=1, max_size=4))
@examples(50)
def test_servers_without_a_common_catalog_are_counted_as_one(parts: list[list[Sample]]) -> None:
    found = merge_reports([told(part, f"pool {number}") for number, part in enumerate(parts)])
    alone = told([sample for part in parts for sample in part], None)
    for mine, theirs in zip(
        [*found.policies, *found.kinds], [*alone.policies, *alone.kinds], strict=True
    ):
        expected = {
            name: pytest.approx(value) if isinstance(value, float) else value
            for name, value in theirs.model_dump().items()
        }
        assert mine.model_dump() == expected
    assert found.pending == len(parts)
    assert found.skipped == {"empty": 2 * len(parts)}


def test_servers_of_one_pool_count_once() -> None:
    sample = Sample(
        1.0, "anna", "naive", RequestKind("1", "0-1023", False), Comparison(True, 0.1, 0.1, None)
    )
    found = merge_reports([told([sample], "one"), told([sample] * 3, "one"), told([sample], "two")])
    assert [row.samples for row in found.policies] == [4]


@pytest.fixture(params=["one catalog", "two catalogs"])
def servers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[Served]]:
    with ExitStack() as stack:
        made = []
        for number in range(2):
            folder = tmp_path / ("0" if request.param == "one catalog" else str(number))
            one = tiny_settings(folder, **AUDITED, **KEYS)
            llm = LLM.from_model(tiny_model(), one)
            made.append(stack.enter_context(serving(llm, one)))
        yield made


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def audit(client: httpx.Client, key: str) -> dict[str, Any]:
    answer = client.get("/v1/audit", headers=bearer(key))
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def test_one_verdict(servers: list[Served], tmp_path: Path) -> None:
    for key, server in zip(("anna", "bert"), servers, strict=True):
        made = server.post("/v1/context_caches", {"chunks": TEXTS[:1]}, headers=bearer(key))
        body = asked(made.json()["data"][0]["id"], ignore_eos=True, link={"policy": "naive"})
        for _ in range(3):
            answer = server.post("/v1/chat/completions", body, headers=bearer(key))
            assert answer.status_code == 200, answer.text
    router_settings = tiny_settings(tmp_path / "router", **KEYS)
    with routing(router_settings, *(server.url for server in servers), api_key="root") as router:
        wait_until(lambda: audit(router, "root")["policies"][:1] and samples(router, "root") == 6)
        found = audit(router, "root")
        assert [row["tenant"] for row in found["tenants"]] == sorted(
            row["tenant"] for row in found["tenants"]
        )
        assert [row["policies"][0]["samples"] for row in found["tenants"]] == [3, 3]
        assert (found["share"], found["setting"]["target"]) == (1.0, 0.98)
        assert (samples(router, "anna"), samples(router, "bert")) == (3, 3)
        assert audit(router, "anna")["tenants"] is None
        assert router.get("/v1/audit").status_code == 401


def samples(router: httpx.Client, key: str) -> int:
    return sum(row["samples"] for row in audit(router, key)["policies"])
