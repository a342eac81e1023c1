"""Puts the metrics of several replicas into one text: each with its replica's label, and the sums
of gauges over all of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

OWN = "kvlinker:"
SUMMED = "kvlinker:fleet_"
"""The prefix of sums' names, in the place of ``OWN``: under the same names, a query that adds up
all replicas would count everything twice."""

_ADDING_UP = {
    *("requests_running", "requests_waiting", "kv_slots_used", "kv_slots_kept", "kv_slots_total"),
    *("held_bytes", "store_bytes", "store_chunks", "prefill_tokens_per_second", "audit_pending"),
}
"""The gauges of which a sum means something."""

_IN_MEMORY = {"device", "host"}
"""The tiers that no two replicas share."""


def exposition(texts: Mapping[str, str]) -> bytes:
    """Return the metrics of all replicas in Prometheus' text format, given theirs by id: with the
    label ``replica``, and the sums of gauges.

    Counters have no sum here: it would fall when a replica ends, and differ from router to router
    where one remembered those that ended, and to Prometheus a fall is a new beginning. It adds up
    their rates itself.
    """
    metrics: dict[str, list[Metric]] = {}
    for replica, text in texts.items():
        try:
            metrics[replica] = list(text_string_to_metric_families(text))
        except (ValueError, IndexError):  # not Prometheus' format
            continue
    registry = CollectorRegistry()
    registry.register(_Families(_label(metrics)))
    registry.register(_Families(_sum(metrics.values())))
    return generate_latest(registry)


class _Families(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


def _label(metrics: Mapping[str, Iterable[Metric]]) -> list[Metric]:
    labelled: dict[str, Metric] = {}
    for replica, families in metrics.items():
        for family in families:
            joined = labelled.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            for sample in family.samples:
                joined.add_sample(sample.name, {**sample.labels, "replica": replica}, sample.value)
    return list(labelled.values())


def _sum(metrics: Iterable[Iterable[Metric]]) -> list[Metric]:
    """Return the sums of those metrics of replicas that are added up."""
    sums: dict[str, Metric] = {}
    values: defaultdict[tuple[str, tuple[tuple[str, str], ...]], float] = defaultdict(float)
    for family in (each for families in metrics for each in families):
        name = family.name.removeprefix(OWN)
        if name == family.name or name not in _ADDING_UP:
            continue
        summed = Metric(SUMMED + name, f"{family.documentation} All replicas.", "gauge")
        sums.setdefault(summed.name, summed)
        for sample in filter(_is_its_own, family.samples):
            values[summed.name, tuple(sorted(sample.labels.items()))] += sample.value
    for (name, labels), value in values.items():
        sums[name].add_sample(name, dict(labels), value)
    return list(sums.values())


def _is_its_own(sample: Sample) -> bool:
    return sample.labels.get("tier", "host") in _IN_MEMORY
