"""The dashboard and the rules: each metric and label that they name is one that ``GET /metrics``
gives."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvlinker.base.events import (
    AgreementFell,
    AnswerAudited,
    AuditSkipped,
    ChunkDamaged,
    ChunkEvicted,
    ChunkLoaded,
    ChunkLookup,
    FirstToken,
    RequestFinished,
    SuccessorsPredicted,
    TierUnavailable,
)
from kvlinker.doors.http.edge.guards import OPEN_PATHS
from tests.deploy.documents import DEPLOY, dashboard, documents_of, rules, settings_given
from tests.doors.http.serving import Served

METRIC = r"\b(kvlinker:[\w:]+|up\b)(?:\{([^}]*)\})?"
GIVEN_BY_PROMETHEUS = {"job", "instance"}


@pytest.fixture(scope="module")
def exposed(served: Served) -> Mapping[str, set[str]]:
    """The names of all samples, with the labels of each; what has happened to nobody yet happens
    first."""
    for event in (
        ChunkLookup(True, "host"),
        ChunkLoaded("disk", 0.1, 1),
        ChunkEvicted("disk", 1),
        ChunkDamaged("disk", "key", "why"),
        TierUnavailable("disk", "why"),
        FirstToken(0.1, "naive"),
        AnswerAudited("naive", agrees=True, alike=True, kl=0.0, answer_kl=0.0, tokens=1),
        AuditSkipped("empty"),
        AgreementFell("naive"),
        SuccessorsPredicted(1, 1),
        RequestFinished("naive", "stop", 0, 0, 0, 0, 0),
    ):
        served.llm.events.publish(event)
    samples: dict[str, set[str]] = defaultdict(set)
    for family in text_string_to_metric_families(served.get("/metrics").text):
        samples[family.name if family.type == "gauge" else ""] |= (
            set()
        )  # a gauge may have no sample yet
        for sample in family.samples:
            samples[sample.name] |= sample.labels.keys()
    samples["kvlinker:tier_bandwidth_bytes_per_second"].add("tier")
    samples["kvlinker:audit_agreement"] |= {"policy", "bound"}
    samples["kvlinker:audit_pending"] |= set()
    return samples


def queries() -> Iterator[tuple[str, str]]:
    """All expressions, with what each is for."""
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield f"{panel['title']} {target['refId']}", target["expr"]
    for rule in rules():
        yield rule.get("record") or rule["alert"], rule["expr"]


def test_metrics_and_labels_exist(
    exposed: Mapping[str, set[str]], subtests: pytest.Subtests
) -> None:
    for name, expression in queries():
        with subtests.test(name):
            recorded = {rule["record"] for rule in rules() if "record" in rule}
            used = re.findall(METRIC, expression)
            assert used
            labels = set(GIVEN_BY_PROMETHEUS)
            for metric, matchers in used:
                if metric in recorded or metric == "up":
                    continue
                assert metric in exposed, name
                given = exposed[metric] | GIVEN_BY_PROMETHEUS
                assert set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers)) <= given, name
                labels |= given
            grouped = {
                label.strip()
                for by in re.findall(r"\b(?:by|on) \(([^)]*)\)", expression)
                for label in by.split(",")
            }
            assert grouped <= labels, name
            assert expression.count("(") == expression.count(")")


def test_dashboard_shows_every_metric(exposed: Mapping[str, set[str]]) -> None:
    """Besides sums and counts, which are in the quantiles, and times of creation."""
    targets = [target for panel in dashboard()["panels"] for target in panel.get("targets", ())]
    shown = {metric for target in targets for metric, _ in re.findall(METRIC, target["expr"])}
    hidden = re.compile(r"_(sum|count|created)$")
    assert {name for name in exposed if name and not hidden.search(name)} <= shown


def test_documentation_names_every_metric(exposed: Mapping[str, set[str]]) -> None:
    """It names histograms as a whole, and no times of creation."""
    page = (DEPLOY.parent / "docs" / "operations.md").read_text(encoding="utf-8")
    section = page.split("\n## Metrics\n")[1].split("\n## ")[0]
    named = {f"kvlinker:{name}" for name in re.findall(r"`(\w+)(?:\{[^}`]*\})?`", section)}
    given = {
        re.sub(r"_(bucket|sum|count)$", "", name)
        for name in exposed
        if name.startswith("kvlinker:") and not name.endswith("_created")
    }
    assert named - {"kvlinker:cached"} == given


def test_panels_lie_side_by_side() -> None:
    """Ids are unique, and no panel covers another."""
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [panel["gridPos"] for panel in panels]
    covered = {
        (x, y)
        for p in places
        for x in range(p["x"], p["x"] + p["w"])
        for y in range(p["y"], p["y"] + p["h"])
    }
    assert len(covered) == sum(place["w"] * place["h"] for place in places)
    assert max(x for x, _ in covered) == 23


def test_dashboard_takes_its_data_from_a_variable() -> None:
    document = dashboard()
    names = {variable["name"] for variable in document["templating"]["list"]}
    assert names == {"datasource", "instance"}
    for panel in document["panels"]:
        assert panel["type"] == "row" or panel["datasource"]["uid"] == "${datasource}"


def test_rules_are_of_one_kind_each() -> None:
    for rule in rules():
        if "alert" in rule:
            assert rule["labels"]["severity"] in ("warning", "critical")
            assert set(rule["annotations"]) == {"summary", "description"}
        else:
            assert set(rule) == {"record", "expr"}
            assert rule["record"].count(":") == 2, (
                "a recorded name has the level, the metric and the operation"
            )


def test_prometheus_reads_the_servers_of_compose() -> None:
    (prometheus,) = documents_of("monitoring/prometheus.yml")
    (scrape,) = prometheus["scrape_configs"]
    services = documents_of("compose.yaml")[0]["services"]
    servers = {
        name
        for name, service in services.items()
        if service.get("image") == "kvlinker" and "command" not in service
    }
    (targets,) = (static["targets"] for static in scrape["static_configs"])
    assert set(targets) == {f"{name}:8000" for name in servers}
    assert scrape["job_name"] == "kvlinker", "rules name it"
    assert scrape["metrics_path"] not in OPEN_PATHS
    assert "API_KEYS" in {name for _, name, _ in settings_given()}
    assert (
        scrape["authorization"]["credentials_file"]
        in (DEPLOY / "monitoring/.gitignore").read_text().split()
    )
    assert all((DEPLOY / "monitoring" / file).is_file() for file in prometheus["rule_files"])


def test_grafana_finds_its_files() -> None:
    grafana = documents_of("compose.yaml")[0]["services"]["grafana"]
    mounted = dict(volume.removesuffix(":ro").split(":") for volume in grafana["volumes"])
    assert all((DEPLOY / file).is_file() for file in mounted)
    (provider,) = documents_of("monitoring/dashboards.yml")[0]["providers"]
    assert mounted["./monitoring/dashboard.json"].startswith(provider["options"]["path"])
    (source,) = documents_of("monitoring/grafana.yml")[0]["datasources"]
    assert source["url"] == "http://prometheus:9090"
