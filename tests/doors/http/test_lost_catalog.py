"""A catalog that is deleted under a running server: it goes on, and accepts nothing that would be
lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvlinker.llm import LLM
from tests.doors.http.serving import serving, tiny_model, tiny_settings


def test_a_deleted_catalog(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = tiny_settings(tmp_path)
    with serving(LLM.from_model(tiny_model(), settings), settings) as served:
        (kept,) = served.cache("The cat sat on the mat.")
        for file in tmp_path.glob("catalog.sqlite*"):
            file.unlink()
        refused = served.post("/v1/context_caches", {"chunks": ["new"]})
        assert refused.status_code == 500
        assert refused.json()["error"]["code"] == "store_unusable"
        assert "removed or replaced" in caplog.text
        content = [{"type": "context_cache", "id": kept}, {"type": "text", "text": "Why?"}]
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 2,
        }
        assert served.post("/v1/chat/completions", body).status_code == 200
    with serving(LLM.from_model(tiny_model(), settings), settings) as served:
        assert served.get(f"/v1/context_caches/{kept}").status_code == 404
        served.cache("The cat sat on the mat.")
