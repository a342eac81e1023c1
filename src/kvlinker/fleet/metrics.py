"""Puts the metrics of several replicas into one text: each with its replica's label, and the sums
over all of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

OWN = "kvlinker:"
SUMMED = "kvlinker:fleet_"
"""What the names of sums begin with, in the place of ``OWN``: under the same names, a query that
adds up all replicas would count everything twice."""

_ADDING_UP = {
    *("requests_running", "requests_waiting", "kv_slots_used", "kv_slots_kept", "kv_slots_total"),
    *("held_bytes", "store_bytes", "store_chunks", "prefill_tokens_per_second", "audit_pending"),
}
"""The gauges of which a sum means something."""

_IN_MEMORY = {"device", "host"}
"""The tiers that no two replicas share."""


class _Series(NamedTuple):
    """One line of a sum: its family's name, type and meaning, its own name, and its labels."""

    family: str
    type: str
    meaning: str
    name: str
    labels: tuple[tuple[str, str], ...]


class FleetMetrics:
    """Keeps the sums of counters and histograms, which go on when a replica ends or begins anew.
    Belongs to one thread, or one event loop."""

    def __init__(self) -> None:
        self._counts: defaultdict[str, dict[_Series, float]] = defaultdict(dict)  # by replica
        self._sums: defaultdict[_Series, float] = defaultdict(float)

    def exposition(self, texts: Mapping[str, str]) -> bytes:
        """Return the metrics of all replicas in Prometheus' text format, given theirs by id: with
        the label ``replica``, and summed."""
        told: dict[str, list[Metric]] = {}
        for replica, text in texts.items():
            try:
                told[replica] = list(text_string_to_metric_families(text))
            except ValueError:  # not Prometheus' format
                continue
        registry = CollectorRegistry()
        registry.register(_Families(_labelled(told)))
        registry.register(_Families(self._summed(told)))
        return generate_latest(registry)

    def _summed(self, told: Mapping[str, Iterable[Metric]]) -> list[Metric]:
        gauges: defaultdict[_Series, float] = defaultdict(float)
        for replica, families in told.items():
            for series, value in _own(families):
                if series.type == "gauge":
                    gauges[series] += value
                else:
                    self._count(replica, series, value)
        sums: dict[str, Metric] = {}
        for series, value in (self._sums | gauges).items():
            family = sums.setdefault(
                series.family, Metric(series.family, series.meaning, series.type)
            )
            family.add_sample(series.name, dict(series.labels), value)
        return list(sums.values())

    def _count(self, replica: str, series: _Series, value: float) -> None:
        """Add what has come since the last time; a replica that has counted less began anew."""
        before = self._counts[replica].get(series, 0.0)
        self._sums[series] += value - before if value >= before else value
        self._counts[replica][series] = value


class _Families(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


def _labelled(told: Mapping[str, Iterable[Metric]]) -> list[Metric]:
    labelled: dict[str, Metric] = {}
    for replica, families in told.items():
        for family in families:
            joined = labelled.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            for sample in family.samples:
                joined.add_sample(
                    sample.name,
                    {**sample.labels, "replica": replica},
                    sample.value,
                    sample.timestamp,
                    sample.exemplar,
                )
    return list(labelled.values())


def _own(families: Iterable[Metric]) -> Iterator[tuple[_Series, float]]:
    """Yield what is added up of a replica's metrics."""
    for family in families:
        name = family.name.removeprefix(OWN)
        if name == family.name:
            continue
        if family.type == "gauge" and name not in _ADDING_UP:
            continue
        for sample in family.samples:
            if family.type == "gauge" and not _is_its_own(sample):
                continue
            yield (
                _Series(
                    SUMMED + name,
                    family.type,
                    f"{family.documentation} All replicas.",
                    sample.name.replace(OWN, SUMMED, 1),
                    tuple(sorted(sample.labels.items())),
                ),
                sample.value,
            )


def _is_its_own(sample: Sample) -> bool:
    return sample.labels.get("tier", "host") in _IN_MEMORY
