import pytest

pytest.importorskip("vllm")

import vllm

from kvlinker.errors import KVLinkerError, UnsupportedModelError
from kvlinker.vllm import adapter


def test_the_installed_version_was_tested():
    adapter.require_tested_version()


def test_other_versions_are_refused_with_the_way_out(monkeypatch):
    monkeypatch.setattr(vllm, "__version__", "0.99.1")
    with pytest.raises(KVLinkerError, match=r"0\.99\.1 .* 0\.32\.0 .*allow_untested"):
        adapter.require_tested_version()
    adapter.require_tested_version(allow_untested=True)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("pipeline_parallel_size", 2, "pipeline_parallel_size is 2, .* tensor_parallel_size"),
        ("speculative_config", {"method": "ngram"}, "leave speculative_config out"),
        ("lora", True, "leave enable_lora out"),
    ],
)
def test_what_is_not_linked_is_refused_with_the_way_out(name, value, told):
    plain = {"pipeline_parallel_size": 1, "speculative_config": None, "lora": None}
    adapter.require_linkable(**plain)
    with pytest.raises(UnsupportedModelError, match=told):
        adapter.require_linkable(**(plain | {name: value}))
