"""GET /v1/audit: what operators and tenants see of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvlinker.base.types.tenants import DEFAULT_TENANT, tenant_of_key
from kvlinker.doors.http.app import create_app
from kvlinker.llm import LLM
from kvlinker.service.audit.comparison import Comparison, RequestKind
from kvlinker.service.audit.findings import Sample
from tests.doors.http.serving import Served, serving, tiny_model, tiny_settings


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    settings = tiny_settings(
        tmp_path_factory.mktemp("audited"),
        api_keys="anna,bert",
        admin_keys="root",
        audit="100%",
        quality_target="98%",
        quality_per_tenant=True,
    )
    with serving(LLM.from_model(tiny_model(), settings), settings) as running:
        for key, policy in (("anna", "naive"), ("anna", "full"), ("bert", "legolink-4")):
            ask(running, key, policy)
        assert running.llm.policy_manager.auditor is not None
        assert running.llm.policy_manager.auditor.wait(30)
        yield running


def ask(served: Served, key: str, policy: str) -> None:
    created = served.post(
        "/v1/context_caches", {"chunks": ["a text that is a chunk", "another"]}, headers=bearer(key)
    )
    ids = [entry["id"] for entry in created.json()["data"]]
    prompt = [
        *({"type": "context_cache", "id": each} for each in ids),
        {"type": "text", "text": "So what?"},
    ]
    body = {
        "prompt": prompt,
        "max_tokens": 4,
        "temperature": 0,
        "ignore_eos": True,
        "link": {"policy": policy},
    }
    answer = served.post("/v1/completions", body, headers=bearer(key))
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["logprobs"] is None


def audit(served: Served, key: str) -> dict[str, Any]:
    answer = served.get("/v1/audit", headers=bearer(key))
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def test_admins_see_all_and_tenants_themselves(audited: Served) -> None:
    told = audit(audited, "root")
    assert (told["object"], told["share"], told["pending"], told["skipped"]) == (
        "audit",
        1.0,
        0,
        {},
    )
    assert [(row["policy"], row["samples"]) for row in told["policies"]] == [
        ("legolink-4", 1),
        ("naive", 1),
    ]
    assert {
        row["tenant"]: [each["policy"] for each in row["policies"]] for row in told["tenants"]
    } == {
        tenant_of_key("anna"): ["naive"],
        tenant_of_key("bert"): ["legolink-4"],
    }
    seen = audit(audited, "anna")
    assert [row["policy"] for row in seen["policies"]] == ["naive"]
    assert [row["policy"] for row in seen["kinds"]] == ["naive"]
    assert seen["tenants"] is None


def test_rows_have_intervals_and_kinds(audited: Served) -> None:
    (row,) = audit(audited, "bert")["policies"]
    assert 0 <= row["ci_low"] <= row["agreement"] <= row["ci_high"] <= 1
    assert row["kl"] >= 0
    assert row["answer_kl"] >= 0
    assert (row["drifts"], row["drifted_at"]) == (0, None)
    (kind,) = audit(audited, "bert")["kinds"]
    assert (kind["chunks"], kind["tokens"], kind["implicit"]) == ("2-4", "0-1023", False)


def test_the_default_policy_is_told_with_what_changed_it(audited: Served) -> None:
    controller = audited.llm.policy_manager.controller
    assert controller is not None
    while controller.policy(tenant_of_key("anna")).name == "legolink-4":
        controller.note(tenant_of_key("anna"), "legolink-4", False, 0.0)
    told = {key: audit(audited, key) for key in ("anna", "bert", "root")}
    assert {key: each["setting"]["policy"] for key, each in told.items()} == {
        "anna": "legolink-8",
        "bert": "legolink-4",
        "root": "legolink-4",
    }
    assert told["anna"]["setting"]["target"] == 0.98
    assert told["anna"]["setting"]["ladder"][-1] == "full"
    assert told["bert"]["decisions"] == []
    (decision,) = told["anna"]["decisions"]
    assert told["root"]["decisions"] == [decision]
    assert (decision["before"], decision["after"], decision["reason"]) == (
        "legolink-4",
        "legolink-8",
        "below target",
    )
    assert audited.get("/v1/policies", headers=bearer("anna")).json()["default"] == "legolink-8"


async def test_a_server_goes_on_where_the_one_before_ended(tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path, audit="100%", quality_target="98%", disk_space=0)
    policies = []
    for _ in range(2):
        llm = LLM.from_model(tiny_model(), settings)
        app = create_app(llm, settings)
        async with app.router.lifespan_context(app):
            policies.append(llm.default_policy().name)
            auditor = llm.policy_manager.auditor
            assert auditor is not None
            assert auditor.pool is not None
            found = Comparison(agrees=False, kl=1.0, answer_kl=1.0, divergence=0)
            kind = RequestKind("1", "0-1023", implicit=False)
            while llm.default_policy().name == "legolink-4":
                auditor.pool.add(Sample(0.0, DEFAULT_TENANT, "legolink-4", kind, found))
                auditor.pool.refresh()
    assert policies == ["legolink-4", "legolink-8"]


def test_without_an_audit_there_is_nothing(served: Served) -> None:
    told = served.get("/v1/audit").json()
    assert (told["share"], told["policies"], told["kinds"], told["decisions"]) == (0.0, [], [], [])
    assert told["setting"] == {"policy": "legolink-4", "target": None, "ladder": None}
