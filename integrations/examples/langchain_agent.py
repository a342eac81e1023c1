"""A LangChain agent that finds cached chunks with a tool, and reads them by their ids; a second
tool tells the time.

Run a server (`make serve`), and cache some documents (`kvlinker ingest examples/notes --url
http://localhost:8000`), then `python integrations/examples/langchain_agent.py "…"`.
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import Any

from langchain.agents import create_agent
from langchain_core.tools import BaseTool, tool

from langchain_kvlinker import ChatKVLinker, KVLinkerRetriever, context_blocks


@tool
def find_notes(query: str) -> list[str | dict[Any, Any]]:
    """Find notes about people, cities and companies."""
    return context_blocks(KVLinkerRetriever(k=3).invoke(query))


@tool
def tell_time() -> str:
    """Tell the time in UTC."""
    return f"{datetime.now(UTC):%H:%M}"


TOOLS: list[BaseTool] = [find_notes, tell_time]


def main(question: str = "Where does Tom Reyes live?") -> None:
    agent = create_agent(ChatKVLinker(temperature=0, max_tokens=64), TOOLS)
    answer = agent.invoke({"messages": [{"role": "user", "content": question}]})
    print(answer["messages"][-1].text)


if __name__ == "__main__":
    main(*sys.argv[1:])
