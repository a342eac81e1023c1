"""Puts the metrics of several replicas into one text."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector


def with_replica(texts: Mapping[str, str]) -> bytes:
    """Return the metrics of all replicas, given by id in Prometheus' text format, with the label
    ``replica`` added to each sample."""
    registry = CollectorRegistry()
    registry.register(_Labelled(texts))
    return generate_latest(registry)


class _Labelled(Collector):
    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = texts

    def collect(self) -> list[Metric]:
        families: dict[str, Metric] = {}
        for replica, text in self._texts.items():
            try:
                told = list(text_string_to_metric_families(text))
            except ValueError:  # not Prometheus' format
                continue
            for family in told:
                joined = families.setdefault(
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
        return list(families.values())
