"""Two agents of the OpenAI Agents SDK: what one read and said is known when the other is asked.

Run a server, `kvlinker serve`, then `python integrations/examples/openai_agents.py`. It needs
`pip install kvlinker openai-agents`.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

from openai import AsyncOpenAI

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
from kvlinker import Client, Workflow

URL = os.environ.get("KVLINKER_BASE_URL", "http://localhost:8000").removesuffix("/v1")
FACTS = {
    "reader": "Mira Holt lives in Varna. She works as a baker.\n\n",
    "writer": "Tom Reyes lives in Oslo. He works as a pilot.\n\n",
}
QUESTIONS = {"reader": "Where does Mira Holt live?", "writer": "Where does Tom Reyes live?"}


def agent_of(name: str, workflow: Workflow, openai: AsyncOpenAI) -> Agent[Any]:
    """Make an agent whose answer is kept. Its prompts are texts: what is cached is found in them by
    what it says, answers of 32 characters or more, too."""
    link = workflow.link(name, keep="answer", ttl="10m", implicit="auto")
    return Agent(
        name,
        model=OpenAIChatCompletionsModel("default", openai_client=openai),
        model_settings=ModelSettings(temperature=0, max_tokens=8, extra_body={"link": link}),
    )


async def main() -> None:
    set_tracing_disabled(True)  # else the SDK sends traces to OpenAI
    workflow = Workflow("facts", {"reader": ["writer"]})
    with Client(URL) as client:
        for name, text in FACTS.items():
            workflow.uses(name, *client.generate_context_cache(text, ttl=600))
    async with AsyncOpenAI(base_url=f"{URL}/v1", api_key="none") as openai:
        said = ""
        for name, question in QUESTIONS.items():
            prompt = f"{FACTS[name]}{said}{question}"
            result = await Runner.run(agent_of(name, workflow, openai), prompt)
            cached = result.context_wrapper.usage.input_tokens_details.cached_tokens
            print(f"{name}: {result.final_output} ({cached} tokens cached)")
            said = f"{name}: {result.final_output}\n\n"


if __name__ == "__main__":
    asyncio.run(main())
