"""The files of the pages for people, as they are served; tests/doors/page has what they do in a
browser."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

import pytest

from kvlinker.doors.http.pages import PAGE_PATHS
from kvlinker_fleet.views import FleetStatus
from tests.doors.http.serving import Served

MEDIA_TYPES = {
    "": "text/html",
    ".js": "text/javascript",
    ".mjs": "text/javascript",
    ".css": "text/css",
    ".html": "text/html",
}

LIBRARIES = "/static/libraries/"


def own_scripts(served: Served) -> dict[str, str]:
    """The texts of the pages' own scripts, by path."""
    own = (path for path in PAGE_PATHS if path.endswith(".js") and LIBRARIES not in path)
    return {path: served.get(path).text for path in own}


def test_files_load_nothing_from_elsewhere(keyed: Served, subtests: pytest.Subtests) -> None:
    for path in sorted(PAGE_PATHS):
        with subtests.test(path):
            answer = keyed.get(path)
            assert answer.status_code == 200, "it needs no key"
            suffix = PurePosixPath(path).suffix
            kind = "text/plain" if path.endswith("LICENSE") else MEDIA_TYPES[suffix]
            assert answer.headers["content-type"].startswith(kind)
            assert answer.headers["x-content-type-options"] == "nosniff"
            policy = answer.headers["content-security-policy"]
            assert policy.startswith(
                "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'"
            )
            assert policy.endswith("require-trusted-types-for 'script'; trusted-types 'none'")
            assert "unsafe" not in policy
            assert "http" not in policy
            if not path.startswith(LIBRARIES):  # in which examples do; the policy is for all
                assert not re.findall(
                    r"(?:src|href|url|from|import)\s*[=(]?\s*[\"']?(?:https?:)?//", answer.text
                )


def test_no_script_writes_markup(served: Served) -> None:
    """All that is shown is text: what a document is called, or says, never becomes markup."""
    scripts = own_scripts(served)
    assert len(scripts) >= 5
    for script in scripts.values():
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", script
        )


def test_scripts_use_ids_that_the_page_has(served: Served) -> None:
    page = served.get("/").text
    ids = set(re.findall(r'id="([\w-]+)"', page))
    for path, script in own_scripts(served).items():
        if path not in ("/static/docs.js", "/static/conversation/policies.js"):
            assert set(re.findall(r'\bby\("([\w-]+)"\)', script)) <= ids, path


def test_libraries_come_with_their_licences() -> None:
    libraries = {path.rpartition("/")[0] for path in PAGE_PATHS if path.startswith(LIBRARIES)}
    assert len(libraries) == 3
    assert {f"{library}/LICENSE" for library in libraries} <= PAGE_PATHS


def test_the_page_reads_what_the_status_tells(served: Served) -> None:
    used = set(re.findall(r"\bstatus\.(\w+)", served.get("/static/server/status.js").text))
    of_a_fleet = {"replicas"}
    assert of_a_fleet <= set(FleetStatus.model_fields)
    assert used <= set(served.get("/status").json()) | of_a_fleet | {"js"}


@pytest.mark.parametrize("name", ["nothing.js", "..%2Fapp.py", "%2e%2e", ""])
def test_other_files_are_not_there(served: Served, name: str) -> None:
    answer = served.get(f"/static/{name}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
