"""Agents in plain Python: what one writes is a chunk of the next one's prompt, and the server knows
what comes next.

Run a server, `kvlinker serve`, then `python examples/agents.py`; an argument is its address.
"""

from __future__ import annotations

import sys

from openai import OpenAI

from kvlinker import Client, Workflow

FACTS = {
    "reader": "Mira Holt lives in Varna. She works as a baker.\n\n",
    "writer": "Tom Reyes lives in Oslo. He works as a pilot.\n\n",
}


def main(url: str = "http://127.0.0.1:8000") -> None:
    workflow = Workflow("facts", {"reader": ["writer"]})
    with Client(url) as client:
        for agent, text in FACTS.items():
            workflow.uses(agent, *client.generate_context_cache(text, ttl=600))
    openai = OpenAI(base_url=f"{url}/v1", api_key="none")
    handed_over: list[str] = []
    for agent, question in (("reader", "Where does Mira Holt live?"), ("writer", "And Tom Reyes?")):
        parts = [{"type": "context_cache", "id": id} for id in (*workflow.ids(agent), *handed_over)]
        answer = openai.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": [*parts, {"type": "text", "text": question}]}],  # type: ignore[list-item,misc]
            max_tokens=8,
            temperature=0,
            extra_body={"link": workflow.link(agent, keep="answer", ttl="10m")},
        )
        link = answer.link  # type: ignore[attr-defined]
        said = answer.choices[0].message.content
        print(f"{agent}: {said}, {len(link['context_caches'])} context caches in the prompt")
        handed_over.append(link["answer"]["id"])
    openai.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
