"""The first hour's check of vLLM goes through without a GPU."""

import pytest

pytest.importorskip("vllm")

from kvlinker_lab.gpu import exactness


def test_answers_of_vllm_are_those_of_the_embedded_engine(tmp_path):
    rows = exactness.main("vllm", tmp_path / "exactness.json")
    assert [row["check"] for row in rows] == list(exactness.POLICIES)
    assert {row["outcome"] for row in rows} == {"exact"}, rows
