"""Two agents as a LangGraph graph, of which the server is told what comes next.

Run a server, `kvlinker serve`, then `python integrations/examples/langgraph_workflow.py`. It needs
`pip install kvlinker langgraph langchain-openai`.
"""

from __future__ import annotations

import os
from typing import Any, TypedDict

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from pydantic import SecretStr

from kvlinker import Client, Workflow

URL = os.environ.get("KVLINKER_BASE_URL", "http://localhost:8000").removesuffix("/v1")
FACTS = {
    "reader": "Mira Holt lives in Varna. She works as a baker.\n\n",
    "writer": "Tom Reyes lives in Oslo. He works as a pilot.\n\n",
}
QUESTIONS = {"reader": "Where does Mira Holt live?", "writer": "Where does Tom Reyes live?"}


class State(TypedDict):
    said: list[str]


workflow = Workflow("facts", {"reader": ["writer"]})
with Client(URL) as client:
    for agent, text in FACTS.items():
        workflow.uses(agent, *client.generate_context_cache(text, ttl=600))
model = ChatOpenAI(
    base_url=f"{URL}/v1", api_key=SecretStr("none"), model="default", temperature=0, max_tokens=8
)


def node(agent: str) -> Any:
    def ask(state: State) -> State:
        parts: list[Any] = [{"type": "context_cache", "id": id} for id in workflow.ids(agent)]
        content = [*parts, {"type": "text", "text": QUESTIONS[agent]}]
        answer = model.bind(extra_body={"link": workflow.link(agent, keep="answer")}).invoke(
            [{"role": "user", "content": content}]
        )
        return {"said": [*state["said"], f"{agent}: {answer.content}"]}

    return ask


graph = StateGraph(State)
for agent in FACTS:
    graph.add_node(agent, node(agent))
graph.add_edge(START, "reader")
graph.add_edge("reader", "writer")
graph.add_edge("writer", END)
print("\n".join(graph.compile().invoke({"said": []})["said"]))
