import pytest

pytest.importorskip("vllm")

import vllm

from kvlinker.errors import KVLinkerError
from kvlinker.vllm import adapter


def test_the_installed_version_was_tested():
    adapter.require_tested_version()


def test_other_versions_are_refused_with_the_way_out(monkeypatch):
    monkeypatch.setattr(vllm, "__version__", "0.99.1")
    with pytest.raises(KVLinkerError, match=r"0\.99\.1 .* 0\.32\.0 .*allow_untested"):
        adapter.require_tested_version()
    adapter.require_tested_version(allow_untested=True)
