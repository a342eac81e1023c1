"""The policies that benchmarks compare."""

import pytest

from kvlinker.quality.bench.harness.benchmark import compared_policies, supported_policies
from kvlinker.settings import load_settings
from tests.toy_models import loaded_model


@pytest.mark.parametrize("engine", ["embedded", "vllm"])
def test_the_policy_that_requests_have_by_default_is_compared(engine):
    settings = load_settings(engine=engine)
    compared = compared_policies(None, settings)
    assert settings.usual_policy in compared
    assert {"full", "naive"} < set(compared)
    assert len(set(compared)) == len(compared)
    assert "query-5-sensitive" in compared


def test_policies_are_compared_as_they_are_given():
    assert compared_policies("naive, query-5,naive", load_settings()) == ["naive", "query-5"]


def test_what_a_model_cannot_be_linked_under_is_not_compared_by_default():
    compared = compared_policies(None, load_settings())
    assert supported_policies(compared, loaded_model("llama")) == compared
    without_attention = supported_policies(compared, loaded_model("mamba-alone"))
    assert without_attention == ["full", "naive", "legolink-16", "attnlink-16", "random-15"]
