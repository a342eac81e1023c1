"""The policies that docs/policies.md shows work as it says."""

import re
from pathlib import Path

import numpy as np
import pytest

from kvlinker.linking import Evidence, known_policies, parse_policy
from kvlinker.linking.registry import _registry
from tests.engines.embedded.conftest import linked_prompt
from tests.linking.test_policies import chunk_prompt, select

PAGE = (Path(__file__).parents[3] / "docs" / "policies.md").read_text()


@pytest.fixture
def documented():
    before = known_policies()
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(block, {})
    yield
    _registry._values.clear()
    _registry._values.update(before)


@pytest.mark.usefixtures("documented")
def test_the_examples_register_and_select():
    prompt = chunk_prompt(5, 6, 2)
    assert select("tail-3", prompt).nonzero()[0].tolist() == [8, 9, 10, 11, 12]
    assert parse_policy("deviating").needs.refines
    attention = np.zeros((2, len(prompt)), dtype=np.float32)
    attention[1, 7] = 1
    assert select("last-layer-10", prompt, Evidence(attention=attention)).nonzero()[0].tolist() == [
        7
    ]


@pytest.mark.usefixtures("documented")
def test_the_examples_answer(bench):
    made = bench()
    prompt = linked_prompt(20, 31, header=3)
    for policy in ("tail-3", "last-layer-10", "deviating", "tail-2+last-layer-5+deviating"):
        answer = made.answer(prompt, policy)
        assert answer.finished.reason == "length"
        assert 0 < answer.finished.usage.recomputed_tokens < 51


def test_every_policy_is_in_the_table():
    for family in known_policies():
        assert re.search(rf"\| `{family}(-[a-zα])?` \|", PAGE), family
