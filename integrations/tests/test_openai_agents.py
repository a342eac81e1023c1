"""Agents of the OpenAI Agents SDK hand their answers over, in both of its APIs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError

from agents import (
    Agent,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
)

UNTRACED = RunConfig(tracing_disabled=True)
SAYING = "Mira Holt lives in Varna, and she works as a baker there, as everybody knows."


async def asked(model: Model, prompt: str, **body: Any) -> tuple[str, int]:
    """What an agent answers, and how many tokens of its prompt were cached."""
    settings = ModelSettings(temperature=0, max_tokens=64, extra_body=body)
    agent = Agent[None]("agent", model=model, model_settings=settings)
    result = await Runner.run(agent, prompt, run_config=UNTRACED)
    return result.final_output, result.context_wrapper.usage.input_tokens_details.cached_tokens


@pytest.mark.parametrize("api", [OpenAIChatCompletionsModel, OpenAIResponsesModel])
def test_answers_are_handed_over(base_url: str, api: Any) -> None:
    async def run() -> None:
        async with AsyncOpenAI(base_url=base_url, api_key="none") as openai:
            model = api("default", openai_client=openai)
            link = {"workflow": api.__name__, "keep": "answer"}
            form = {"guided_choice": [SAYING]}
            said, _ = await asked(model, f"Who is she? {api.__name__}", link=link, **form)
            assert said == SAYING
            over = f"{api.__name__} was told: {said} Where does Mira Holt live?"
            _, cached = await asked(model, over, link={"workflow": api.__name__})
            _, alone = await asked(model, over.upper(), link={"workflow": api.__name__})
            assert cached >= 16 > alone

    asyncio.run(run())


def test_what_the_server_refuses_is_raised(base_url: str) -> None:
    async def run() -> None:
        async with AsyncOpenAI(base_url=base_url, api_key="none") as openai:
            model = OpenAIChatCompletionsModel("default", openai_client=openai)
            use = {"ids": ["cc_no"], "steps": 1}
            with pytest.raises(BadRequestError, match="cc_no"):
                await asked(model, "Hello", link={"workflow": "f", "next": [use]})

    asyncio.run(run())
