"""Agents of the command line, as they come from their packages, do a task with a tool: the small
model repeats the call that the user tells it, the agent runs it, and goes on with the result."""

from __future__ import annotations

import json
from itertools import pairwise

from .conftest import Agent, Server

COMMAND = "cat notes.txt > seen.txt"


def calling(tool: str, **arguments: object) -> str:
    """What makes a model of half a billion parameters call a tool, behind any system prompt."""
    call = json.dumps({"name": tool, "arguments": arguments})
    return f"Answer with exactly this: <tool_call>{call}</tool_call>"


def run_loop(agent: Agent, server: Server, *command: str, **environment: str) -> None:
    """Run an agent until the command was run, and the model was asked again behind its result,
    which took nearly all of the prompt from the cache. So small a model calls again and again."""

    def is_closed() -> bool:
        prompts = [each for each in server.requests() if each["prompt_tokens"] > 2000]
        return any(
            after["prompt_tokens"] > before["prompt_tokens"] <= after.get("cached", 0) / 0.98
            for before, after in pairwise(prompts)
        )

    agent.run(*command, until=is_closed, **environment)
    assert is_closed()
    assert (agent.repository / "seen.txt").read_text() == "Zebra crossing.\n"


def test_codex(agent: Agent, server: Server) -> None:
    agent.configure(
        ".codex/config.toml",
        f"""
        model = "default"
        model_provider = "kvlinker"
        model_context_window = 32768
        check_for_update_on_startup = false
        analytics.enabled = false
        model_providers.kvlinker = {{name = "kvlinker", base_url = "{server.url}/v1"}}
        """,
    )
    run_loop(
        agent,
        server,
        *("codex", "exec", "--dangerously-bypass-approvals-and-sandbox"),
        calling("exec_command", cmd=COMMAND),
    )


def test_claude_code(agent: Agent, server: Server) -> None:
    run_loop(
        agent,
        server,
        *("claude", "--allowedTools", "Bash", "--print", calling("Bash", command=COMMAND)),
        ANTHROPIC_BASE_URL=server.url,
        ANTHROPIC_AUTH_TOKEN="none",
        ANTHROPIC_MODEL="default",
        ANTHROPIC_SMALL_FAST_MODEL="default",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )


def test_opencode(agent: Agent, server: Server) -> None:
    model = {"name": "default", "limit": {"context": 32768, "output": 1024}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{server.url}/v1"},
        "models": {"default": model},
    }
    options = {"model": "kvlinker/default", "autoupdate": False, "share": "disabled"}
    agent.configure(
        ".config/opencode/opencode.json", json.dumps({"provider": {"kvlinker": provider}} | options)
    )
    run_loop(
        agent,
        server,
        *("opencode", "run", calling("bash", command=COMMAND, description="reads the notes")),
        OPENCODE_DISABLE_MODELS_FETCH="1",
        OPENCODE_DISABLE_LSP_DOWNLOAD="1",
        OPENCODE_DISABLE_DEFAULT_PLUGINS="1",
    )


def test_qwen_code(agent: Agent, server: Server) -> None:
    """Its prompts have 17,000 tokens, and it waits four minutes for an answer unless told to wait
    for longer."""
    agent.configure(
        ".qwen/settings.json",
        json.dumps(
            {
                "general": {"enableAutoUpdate": False},
                "privacy": {"usageStatisticsEnabled": False},
                "memory": {"enableManagedAutoMemory": False},
            }
        ),
    )
    run_loop(
        agent,
        server,
        *("qwen", "--auth-type", "openai", "--model", "default", "--yolo", "--prompt"),
        calling("run_shell_command", command=COMMAND, is_background=False),
        OPENAI_BASE_URL=f"{server.url}/v1",
        OPENAI_API_KEY="none",
        QWEN_STREAM_IDLE_TIMEOUT_MS="1000000",
    )


def test_aider(agent: Agent, server: Server) -> None:
    """It has no tools: it reads a file's new text in the answer, writes and commits it."""
    answer = "Answer with exactly this:\n\nnotes.txt\n```\nTiger crossing.\n```"
    agent.run(
        *("aider", "--model", "openai/default", "--edit-format", "whole", "--yes-always"),
        *("--no-check-update", "--analytics-disable", "--no-show-model-warnings", "--no-pretty"),
        *("--message", answer, "notes.txt"),
        OPENAI_API_BASE=f"{server.url}/v1",
        OPENAI_API_KEY="none",
        LITELLM_LOCAL_MODEL_COST_MAP="True",
    )
    assert (agent.repository / "notes.txt").read_text() == "Tiger crossing.\n"
    assert len(server.requests()) >= 2  # the second names the commit
