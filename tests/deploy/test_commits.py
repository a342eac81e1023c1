"""The form of commit subjects."""

from __future__ import annotations

from tools.check_commits import complaint


def test_subjects_have_a_scope_and_an_imperative() -> None:
    right = (
        "engine: wake once a layer",
        "docs: address what readers asked",
        "store, catalog: embed texts in batches",
        "tests/http: fold tables",
    )
    assert [complaint(subject) for subject in right] == [None] * len(right)


def test_other_subjects_are_refused_with_the_reason() -> None:
    wrong = {
        "What is due to the eldest prompt is settled": "of the form",
        "engine: Wake once a layer": "of the form",
        "engine: wake": "of the form",
        "engine:wake once a layer": "of the form",
        "engine: wakes once a layer": "'wakes' is no imperative",
        "engine: fixed the order of runs": "'fixed' is no imperative",
        "engine: adding a layer": "'adding' is no imperative",
        f"engine: wake {'x' * 60}": "73 characters",
    }
    for subject, reason in wrong.items():
        assert reason in (complaint(subject) or ""), subject
