"""LlamaIndex query engines that know nothing of kvlinker: the documents that they retrieve are
reused in any order.

Run a server that recognises them, `kvlinker serve --implicit auto`, then `python
examples/llamaindex_engine.py`; an argument is the server's address. It needs `pip install
llama-index-core llama-index-llms-openai-like`.
"""

from __future__ import annotations

import sys
from typing import Any

from llama_index.core import Document, SummaryIndex
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent
from llama_index.llms.openai_like import OpenAILike

PEOPLE = (("Tom Reyes", "Oslo"), ("Mira Holt", "Varna"), ("Ana Diaz", "Lima"))
DOCUMENTS = [
    "\n".join(f"{name} was seen in {city} on day {day} of the journey." for day in range(1, 10))
    for name, city in PEOPLE
]


class PrintUsage(BaseEventHandler):
    """Tells what each call of the model reused."""

    def handle(self, event: Any, **_: Any) -> None:
        if isinstance(event, LLMChatEndEvent):
            usage = event.response.raw.usage
            print(
                f"{usage.prompt_tokens} prompt tokens, {usage.prompt_tokens_details.cached_tokens}"
                " of them cached"
            )


def main(url: str = "http://127.0.0.1:8000") -> None:
    model = OpenAILike(
        api_base=f"{url}/v1",
        api_key="none",
        model="default",
        is_chat_model=True,
        temperature=0,
        max_tokens=8,
    )
    get_dispatcher().add_event_handler(PrintUsage())
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        index = SummaryIndex.from_documents([Document(text=DOCUMENTS[number]) for number in order])
        index.as_query_engine(llm=model).query("Where was Tom Reyes seen?")


if __name__ == "__main__":
    main(*sys.argv[1:])
