"""Measuring the policies of ``auto`` with the engine that serves."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from kvlinker.base.errors import EngineClosedError, InvalidRequestError
from kvlinker.linking import parse_policy
from kvlinker.llm import LLM
from kvlinker.quality.policy_measurement import (
    TENANT,
    affordable_questions,
    measure_in_background,
    measure_policies,
)
from kvlinker.settings import Settings
from tests.waiting import wait_until


@pytest.fixture(autouse=True)
def _soon_and_little(monkeypatch):
    """Rows in one context, of few questions, at once."""
    monkeypatch.setattr("kvlinker.engines.contract.places.CONTEXTS", 1)
    monkeypatch.setattr("kvlinker.quality.policy_measurement.QUESTIONS", 1)
    monkeypatch.setattr("kvlinker.quality.policy_measurement.LEAST_QUESTIONS", 1)
    monkeypatch.setattr("kvlinker.quality.policy_measurement.IDLE_SECONDS", 0.0)


@pytest.fixture
def llm(tmp_path):
    with LLM(state_dir=tmp_path) as made:
        yield made


def test_policies_are_as_far_from_full_as_they_compute_less(llm):
    names = ("naive", "query-40", "full")
    naive, query, full = measure_policies(llm, [parse_policy(each) for each in names], questions=2)
    assert naive.answer_kl > query.answer_kl > full.answer_kl
    assert full.answer_kl < 1e-3
    assert full.agreement > 0.9
    assert naive.recomputed == 0
    assert 0.3 < query.recomputed < 0.5
    assert {each.prompts for each in (naive, query, full)} == {2}


def test_rows_are_computed_before_and_nothing_is_left(llm):
    before = {tier.name: tier.used_bytes for tier in llm.tiers()}
    (row,) = measure_policies(llm, [parse_policy("row")], questions=1)
    assert row.recomputed == 0
    llm.store.flush()
    assert {tier.name: tier.used_bytes for tier in llm.tiers()} == before
    assert not llm.list_caches(tenant=TENANT).items


def test_a_server_measures_once(tmp_path, monkeypatch):
    settings = Settings(state_dir=tmp_path)
    with LLM.from_settings(settings) as llm, measure_in_background(llm):
        wait_until(lambda: figures_of(llm))
        chosen = llm.default_policy()
    monkeypatch.setattr("kvlinker.quality.policy_measurement.measure_policies", refused)
    with LLM.from_settings(settings) as llm, measure_in_background(llm):
        assert figures_of(llm)
        assert llm.default_policy() == chosen


def test_a_server_whose_policy_is_set_measures_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("kvlinker.quality.policy_measurement.measure_policies", refused)
    with LLM(state_dir=tmp_path, policy="row") as llm, measure_in_background(llm):
        assert llm.policy_manager.auto is None


def figures_of(llm):
    assert llm.policy_manager.auto is not None
    return llm.policy_manager.auto.figures


def refused(*_args, **_options):
    raise AssertionError("it measures")


def test_measuring_ends_with_the_server(tmp_path):
    settings = Settings(state_dir=tmp_path)
    with LLM.from_settings(settings) as llm:
        with measure_in_background(llm):
            wait_until(
                lambda: any(each.name == "kvlinker-measuring" for each in threading.enumerate())
            )
        wait_until(lambda: all(each.name != "kvlinker-measuring" for each in threading.enumerate()))
        assert not figures_of(llm)


def test_a_server_that_stops_meanwhile_has_no_error(tmp_path, caplog):
    llm = LLM.from_settings(Settings(state_dir=tmp_path))
    with measure_in_background(llm):
        wait_until(lambda: llm.current_load().running)
        llm.close()
        wait_until(lambda: all(each.name != "kvlinker-measuring" for each in threading.enumerate()))
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize(
    ("seconds", "expected"), [(None, 8), (0.01, 8), (2.0, 6), (20.0, 2), (100.0, 2)]
)
def test_slow_engines_are_asked_less(monkeypatch, seconds, expected):
    monkeypatch.setattr("kvlinker.quality.policy_measurement.QUESTIONS", 8)
    monkeypatch.setattr("kvlinker.quality.policy_measurement.LEAST_QUESTIONS", 2)
    llm: Any = SimpleNamespace(engine=SimpleNamespace(prefill_seconds=lambda tokens: seconds))
    assert affordable_questions(llm) == expected


def test_a_model_without_a_chat_template_is_told_of_in_a_line(tmp_path, monkeypatch, caplog):
    def chat(_builder, _messages):
        raise InvalidRequestError("There is no chat template.")

    monkeypatch.setattr("kvlinker.prompting.builder.PromptBuilder.chat", chat)
    with LLM.from_settings(Settings(state_dir=tmp_path)) as llm, measure_in_background(llm):
        wait_until(lambda: "There is no chat template." in caplog.text)
    assert not [record for record in caplog.records if record.exc_info]


def test_what_a_request_fails_with_ends_the_measurement(llm):
    llm.engine.close()
    with pytest.raises(EngineClosedError):
        measure_policies(llm, [parse_policy("naive")], questions=1)
