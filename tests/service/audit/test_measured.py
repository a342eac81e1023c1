"""The policy ``auto``: the cheapest that keeps the wanted quality, by what was measured."""

import json
import logging

import pytest

from kvlinker.base.errors import PolicyError
from kvlinker.llm import LLM
from kvlinker.service.audit.measured import FOLDER, TARGETS, AutoPolicy, PolicyFigures
from kvlinker.settings import UNMEASURED, Settings
from tests.doors.http.serving import tiny_model

FINGERPRINT = "0123456789abcdef" * 4


def settings_at(folder, **options):
    return Settings(state_dir=folder, **options)


def auto(folder, fingerprint=FINGERPRINT, refused=(), **options):
    def refusal(policy):
        return "no" if any(part.family in refused for part in policy.parts) else None

    return AutoPolicy(settings_at(folder, **options), fingerprint, refusal)


def figures(*kls, names=("row", "row+query-5-sensitive", "row+query-15-sensitive")):
    return [
        PolicyFigures(name, kl, agreement=0.9, recomputed=0.1, prompts=8, tokens=100)
        for name, kl in zip(names, kls, strict=True)
    ]


@pytest.mark.parametrize(
    ("quality", "kls", "expected"),
    [
        ("high", (0.04, 0.02, 0.01), "row"),
        ("high", (0.06, 0.05, 0.01), "row+query-5-sensitive"),
        ("high", (0.06, 0.07, 0.051), "full"),
        ("balanced", (0.06, 0.02, 0.01), "row"),
        ("fast", (0.3, 0.25, 0.2), "row+query-15-sensitive"),
    ],
)
def test_the_cheapest_policy_that_keeps_the_quality_is_chosen(tmp_path, quality, kls, expected):
    found = auto(tmp_path, quality=quality)
    assert found.policy.name == UNMEASURED
    found.keep(figures(*kls))
    assert found.policy.name == expected
    assert auto(tmp_path, quality=quality).policy.name == expected


def test_the_same_figures_serve_each_quality(tmp_path):
    auto(tmp_path).keep(figures(0.15, 0.08, 0.04))
    chosen = [auto(tmp_path, quality=quality).policy.name for quality in TARGETS]
    assert chosen == ["row+query-15-sensitive", "row+query-5-sensitive", "row"]


def test_figures_of_other_conditions_or_models_count_as_none(tmp_path):
    auto(tmp_path).keep(figures(0.01, 0.01, 0.01))
    assert auto(tmp_path).figures
    assert not auto(tmp_path, FINGERPRINT[:16] + "f" * 48).figures
    assert not auto(tmp_path, system_prompt="Answer briefly.").figures
    assert not auto(tmp_path, disk_codec="int4").figures
    assert not auto(tmp_path, refused=("query",)).figures


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"figures": 3}', b"\xff"])
def test_a_damaged_file_counts_as_none(tmp_path, content):
    auto(tmp_path).keep(figures(0.01, 0.01, 0.01))
    (file,) = (tmp_path / FOLDER).iterdir()
    file.write_bytes(content)
    assert auto(tmp_path).policy.name == UNMEASURED
    fields = {"figures": [{"policy": "row"}], "fingerprint": FINGERPRINT}
    file.write_text(json.dumps(fields))
    assert auto(tmp_path).policy.name == UNMEASURED


def test_a_folder_that_cannot_be_written_costs_the_memory_only(tmp_path, caplog):
    (tmp_path / FOLDER).write_text("a file")
    caplog.set_level(logging.INFO)
    found = auto(tmp_path)
    found.keep(figures(0.01, 0.01, 0.01))
    assert found.policy.name == "row"
    assert "measured again next time" in caplog.text
    assert "row has a KL of 0.010" in caplog.text


def test_engines_without_places_choose_among_other_policies(tmp_path):
    found = auto(tmp_path, refused=("row",))
    assert found.policy.name == "query-5-sensitive"
    assert [each.name for each in found.candidates] == [
        "query-5-sensitive",
        "legolink-16",
        "query-15-sensitive",
    ]
    assert auto(tmp_path, refused=("row", "query")).policy.name == "legolink-16"


def test_a_server_follows_the_choice_at_once(tmp_path):
    with LLM.from_model(tiny_model(), settings_at(tmp_path)) as llm:
        assert llm.default_policy().name == UNMEASURED
        assert llm.policy_manager.auto is not None
        llm.policy_manager.auto.keep(figures(0.2, 0.2, 0.2))
        assert llm.default_policy().name == "full"
        assert not llm.policy_manager.needs_no_chunks


def test_a_request_may_ask_for_what_is_chosen(tmp_path):
    with LLM.from_model(tiny_model(), settings_at(tmp_path, policy="legolink-8")) as llm:
        assert llm.read_completion("Hello there", policy="auto").policy.name == "legolink-8"


def test_only_certified_policies_are_chosen(tmp_path):
    with pytest.raises(PolicyError, match="no certificate"):
        LLM.from_model(tiny_model(), settings_at(tmp_path, require_certificate=True))
