"""What needs no model is loaded without torch: tests of it, with the modules that they test, and
the router."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parent
LIGHT = ("base/types", "prompting", "linking", "doors/client")
HEAVY = (
    "torch",
    "fastapi",
    "uvicorn",
    "kvlinker.llm",
    "kvlinker.doors.http.app",
    "kvlinker.engines.embedded",
    "kvlinker_vllm",
)
COLLECT = """
import sys, pytest
status = pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *sys.argv[1].split(",")])
loaded = [name for name in sys.argv[2].split(",") if name in sys.modules]
print(status.value, *loaded, file=sys.stderr)
"""

ROUTER = """
import sys
import kvlinker_fleet.commands.router
from kvlinker_fleet.app import create_router
from kvlinker.settings import load_settings
create_router(None, load_settings(), api_key=None)
print(*sys.modules)
"""


@pytest.mark.whole
def test_collecting_loads_nothing_heavy() -> None:
    """The light folders are collected in a process of their own, which then tells which heavy
    modules it has."""
    folders = [TESTS / name for name in LIGHT]
    run = subprocess.run(
        [sys.executable, "-c", COLLECT, ",".join(map(str, folders)), ",".join(HEAVY)],
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert run.stderr.split() == ["0"], run.stdout + run.stderr


def test_the_router_needs_no_torch() -> None:
    """So that it starts at once, and takes little memory."""
    run = subprocess.run([sys.executable, "-c", ROUTER], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "kvlinker.llm"} & set(run.stdout.split())


SERVING = """
import sys
from kvlinker.base import own_process
own_process.set_up()
import kvlinker.engines.embedded, kvlinker.doors.serving, kvlinker.llm
heavy = "scipy", "sklearn", "sympy", "torch._dynamo", "torch._inductor", "torch.distributed.tensor"
print(*(name for name in heavy if name in sys.modules), "loaded")
import torch
from transformers.masking_utils import TransformGetItemToIndex
import transformers
families = transformers.models
print(families.llama.LlamaConfig is transformers.LlamaConfig is families.LlamaConfig)
with TransformGetItemToIndex():
    print(torch.compile.__module__, torch._dynamo.__file__, torch.distributed.is_available())
"""


@pytest.mark.whole
def test_a_server_imports_no_compiler() -> None:
    """It takes as long as all the rest, and is there for code that asks for it."""
    run = subprocess.run(
        [sys.executable, "-c", SERVING], capture_output=True, text=True, timeout=120, check=True
    )
    loaded, has_families, compiler = run.stdout.splitlines()
    assert loaded == "loaded"
    assert has_families == "True"
    assert "_dynamo/__init__.py" in compiler


EMBEDDED = """
import sys
from kvlinker.base import own_process
own_process.set_up()
import kvlinker.llm, kvlinker.engines.embedded.model_loading
print(*(name for name in ("scipy", "sklearn", "triton") if name in sys.modules))
import scipy.special
from transformers.utils import is_scipy_available
print(is_scipy_available(), *(name for name, kept in sys.modules.items() if kept is None))
"""


@pytest.mark.whole
def test_commands_load_no_library_that_the_engine_does_not_need() -> None:
    """They take as much memory as a model of 90M parameters."""
    run = subprocess.run(
        [sys.executable, "-c", EMBEDDED], capture_output=True, text=True, timeout=120, check=True
    )
    loaded, after = run.stdout.splitlines()[-2:]
    assert set(loaded.split()) <= ({"triton"} if torch.version.cuda else set())
    assert after.split()[0] == "False"
    assert not {"scipy", "sklearn", "triton"} & set(after.split())


UNCHANGED = """
import os
environment = dict(os.environ)
"""
SAME = """
import kvlinker.cli
print(dict(os.environ) == environment)
"""


@pytest.mark.whole
def test_a_program_that_uses_the_library_has_all_of_transformers() -> None:
    program = UNCHANGED + EMBEDDED.replace("own_process.set_up()\n", "") + SAME
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert run.stdout.splitlines()[-2:] == ["True", "True"]


@pytest.mark.whole
def test_commands_leave_transformers_as_it_is_once_imported() -> None:
    """vLLM imports it before kvlinker's engine is, and it remembers then what is installed."""
    first = "from transformers.utils import is_scipy_available; is_scipy_available()"
    program = EMBEDDED.replace("import sys", f"import sys; {first}")
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert run.stdout.split()[-1] == "True"


CORE = """
import sys
from pathlib import Path
from kvlinker.llm import LLM
from tests.doors.http.serving import tiny_model, tiny_settings
with LLM.from_model(tiny_model(), tiny_settings(Path(sys.argv[1]), **eval(sys.argv[2]))) as llm:
    caches = llm.generate_context_cache(["The kettle is green."])
    llm.chat_completion([{"role": "user", "content": [*caches, "Which colour?"]}], max_tokens=1)
print(*sys.modules)
"""
REMOTE = {
    "kvlinker.store.catalog.databases.postgresql": {},
    "kvlinker.store.catalog.encryption": {"encryption_key": "0" * 64},
    "kvlinker.store.format.encryption": {"encryption_key": "0" * 64},
    "kvlinker.store.remote.objects": {"object_url": "memory://objects"},
    "kvlinker.store.remote.redis": {"redis_url": "redis://127.0.0.1:1/0"},
    "boto3": {},
    "cryptography": {"encryption_key": "0" * 64},
    "fsspec.core": {"object_url": "memory://objects"},
    "psycopg": {},
    "redis": {"redis_url": "redis://127.0.0.1:1/0"},
    "s3fs": {},
}
"""What encryption, object stores, Redis and PostgreSQL need, and settings that import it."""


def test_the_core_imports_no_library_without_its_setting(tmp_path: Path) -> None:
    loaded = [
        set(
            subprocess.run(
                [sys.executable, "-c", CORE, str(tmp_path / str(number)), repr(settings)],
                cwd=TESTS.parent,
                capture_output=True,
                text=True,
                check=True,
            ).stdout.split()
        )
        for number, settings in enumerate(
            ({}, {name: value for each in REMOTE.values() for name, value in each.items()})
        )
    ]
    assert not REMOTE.keys() & loaded[0]
    assert {name for name, settings in REMOTE.items() if settings} <= loaded[1]
