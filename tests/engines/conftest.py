"""Chooses the instances of parametrized engine tests that belong to the core."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from kvlinker.linking import parse_policy
from tests.kinds import KINDS


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as ``matrix`` what a product of families, policies and prompts has beyond the core.

    The core runs each test with one family of each kind of attention (``KINDS``), or with the
    first family where there is none of them; with one policy of each kind of evidence; and of
    stacked parameters with each value once.
    """
    functions: defaultdict[tuple[Path, str], list[pytest.Function]] = defaultdict(list)
    for item in items:
        here = item.path.is_relative_to(Path(__file__).parent)
        beyond = any(map(item.get_closest_marker, ("matrix", "whole")))
        if here and not beyond and isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            functions[item.path, item.nodeid.partition("[")[0]].append(item)
    for instances in functions.values():
        core = _each_value_once(_one_policy_of_each_kind(_one_of_each_kind(instances)))
        for item in instances:
            if item not in core:
                item.add_marker(pytest.mark.matrix)


def _one_of_each_kind(instances: list[pytest.Function]) -> list[pytest.Function]:
    families = [_parameters(item).get("family") for item in instances]
    wanted: set[Any] = {name for name in KINDS if name in families} or {families[0]}
    return [item for item, family in zip(instances, families, strict=True) if family in wanted]


def _one_policy_of_each_kind(instances: list[pytest.Function]) -> list[pytest.Function]:
    """Policies that need the same evidence are of one kind. The oracle's tests are not concerned:
    each of them goes through all policies by itself."""
    first: dict[object, str] = {}
    for item in instances:
        name = _parameters(item).get("policy")
        if isinstance(name, str):
            needs = parse_policy(name).needs
            kind = (needs.question_attention, needs.refines, needs.reads_scores, name == "full")
            first.setdefault(kind, name)
    return [
        item
        for item in instances
        if not isinstance(_parameters(item).get("policy"), str)
        or _parameters(item)["policy"] in first.values()
    ]


def _each_value_once(instances: list[pytest.Function]) -> list[pytest.Function]:
    """Leave out the instances each of whose values an earlier one has, too."""
    seen: set[tuple[str, int]] = set()
    core = []
    for item in instances:
        values = {(name, id(value)) for name, value in _parameters(item).items()}
        if not values <= seen:
            core.append(item)
        seen |= values
    return core


def _parameters(item: pytest.Function) -> dict[str, Any]:
    parameters: dict[str, Any] = item.callspec.params
    return parameters
