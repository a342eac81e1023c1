"""A server in a thread, on a free port, over a tiny random model; for tests that speak HTTP.

What loads torch or the server is imported inside the functions: tests of the client are collected
without either.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from kvlinker.settings import Settings, load_settings
from tests.waiting import PATIENCE, wait_until

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI

    from kvlinker.engines.embedded.model.loaded import LoadedModel
    from kvlinker.llm import LLM

MODEL_NAME = "tiny"
CONTEXT_WINDOW = 2048
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|start|>{{ message['role'] }}\n{{"
    " message['content'] }}<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{%"
    " endif %}"
)
MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<|im_start|>")
"""Tokens of their own in the vocabulary of models that call tools, or reason."""


@dataclass(frozen=True)
class Served:
    """A running server."""

    url: str
    llm: LLM
    http: httpx.Client

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.http.get(path, **options)

    def post(self, path: str, body: Mapping[str, Any], **options: Any) -> httpx.Response:
        return self.http.post(path, json=body, **options)

    def cache(self, *chunks: str, **options: Any) -> list[str]:
        """Ids of context caches of these chunks."""
        answer = self.post("/v1/context_caches", {"chunks": chunks, **options})
        assert answer.status_code == 200, answer.text
        return [entry["id"] for entry in answer.json()["data"]]

    def expire(self, *ids: str, tenant: str = "default") -> None:
        """Have context caches expired, as if their time had passed."""
        for cache_id in ids:
            self.llm.catalog.update(cache_id, tenant, time.time(), expires_at=time.time() - 1)

    def wait_until_idle(self) -> None:
        """Wait until the engine has given up all slots."""

        def is_idle() -> bool:
            load = self.llm.current_load()
            return (load.running, load.waiting, load.slots_used) == (0, 0, 0)

        wait_until(is_idle)


@cache
def tiny_model(
    head_dim: int = 8, marks: tuple[str, ...] = (), dtype: str = "bfloat16"
) -> LoadedModel:
    """A model with random weights, and ``marks`` as special tokens of its own. In bf16, native code
    computes a token in 0.6 ms; in fp32, the model's modules take 4 ms."""
    import copy

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from kvlinker.engines.embedded.model_loading import prepare_model
    from tests.toy_tokenizers import byte_level

    torch.manual_seed(0)
    tokenizer = copy.deepcopy(byte_level())
    tokenizer.add_special_tokens({"additional_special_tokens": list(marks)})
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=CONTEXT_WINDOW,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return prepare_model(LlamaForCausalLM(config).eval().to(getattr(torch, dtype)), tokenizer)


def tiny_settings(state_dir: Path, **options: Any) -> Settings:
    defaults = {
        "model": MODEL_NAME,
        "policy": "legolink-4",
        "chat_template": TEMPLATE,
        "kv_slots": 16_384,
        "prefix_cache": "off",  # so that a test's requests do not depend on those before them
        "implicit_ahead": "off",  # what is computed ahead depends on the time between requests
        "host_memory": 256 * 2**20,
        "disk_space": 256 * 2**20,
    }
    return load_settings(state_dir=state_dir, **(defaults | options))


_DOCUMENTS: dict[tuple[bool, bool], dict[str, Any]] = {}
"""The OpenAPI documents of servers with and without keys, and checks of hosts: each takes a second
to make, and is the same for all of its kind."""


@contextmanager
def serving(
    llm: LLM, settings: Settings, *, headers: Mapping[str, str] | None = None, closes: bool = True
) -> Iterator[Served]:
    """Serve until the block ends; closes the LLM, unless another server has it. Every answer is
    checked against the server's OpenAPI document."""
    from kvlinker.doors.http.app import create_app
    from tests.doors.http.openapi_contract import Contract

    app = create_app(llm, settings)
    kind = (app.state.keyed, app.state.hosts_checked)
    app.openapi_schema = _DOCUMENTS.get(kind)
    _DOCUMENTS[kind] = app.openapi()
    hooks = {"response": [Contract(app.openapi()).check]}
    with (
        listening(app, settings, closes=closes) as url,
        httpx.Client(base_url=url, headers=headers, timeout=PATIENCE, event_hooks=hooks) as http,
    ):
        yield Served(url, llm, http)


@contextmanager
def listening(
    app: FastAPI, settings: Settings, *, closes: bool = True, port: int = 0
) -> Iterator[str]:
    """The URL of a server of an app, until the block ends; on a free port, unless one is given."""
    import uvicorn

    from kvlinker.doors.http.edge.address import bind, url_of
    from kvlinker.doors.http.edge.connections import server_config

    listener = bind("127.0.0.1", port)
    config = server_config(app, request_timeout=settings.request_timeout)
    config.lifespan = "on" if closes else "off"
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    url = url_of(listener)
    try:
        _wait_until_up(url)
        yield url
    finally:
        server.should_exit = True
        thread.join(timeout=PATIENCE)
        assert not thread.is_alive(), f"the server does not stop:\n{_under_way(server)}"


def _under_way(server: uvicorn.Server) -> str:
    """What holds a server up: its connections, what it waits for, and where each thread is."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    frames = sys._current_frames()
    stacks = (
        f"{each.name}:\n{''.join(traceback.format_stack(frames[each.ident]))}"
        for each in threading.enumerate()
        if each.ident in frames
    )
    connections = (
        f"{each.transport!r}, request: {each.cycle and vars(each.cycle)}"
        for each in list(server.server_state.connections)
        if isinstance(each, H11Protocol)
    )
    waiting = asyncio.all_tasks(server.servers[0].get_loop())
    return "\n".join([*connections, *map(repr, waiting), *stacks])


def _wait_until_up(url: str) -> None:
    def is_up() -> bool:
        try:
            httpx.get(f"{url}/health", timeout=PATIENCE)
        except httpx.ConnectError:
            return False
        return True

    wait_until(is_up)
