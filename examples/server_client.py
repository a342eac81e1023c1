"""OpenAI's client against a running server: cache chunks by one extra route, and name them in
messages.

Start a server with ``make serve`` first; a URL may be given as the argument.
"""

import sys
from typing import Any

from openai import OpenAI

CHUNKS = [
    "Mira Holt lives in Varna. She works as a baker.\n\n",
    "Tom Reyes lives in Oslo. He works as a pilot.\n\n",
]


def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000"
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    body = {"chunks": CHUNKS, "ttl": "600s"}
    created: Any = client.post("/context_caches", cast_to=object, body=body)
    parts: list[Any] = [{"type": "context_cache", "id": cache["id"]} for cache in created["data"]]
    question: Any = {"type": "text", "text": "Question: Where does Tom Reyes live?"}
    stream = client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": [*reversed(parts), question]}],
        max_tokens=8,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"link": {"policy": "legolink-4"}},
    )
    for event in stream:
        for choice in event.choices:
            print(choice.delta.content or "", end="", flush=True)
        if event.usage:
            details: Any = event.usage.prompt_tokens_details
            print(
                f"\n{event.usage.prompt_tokens} prompt tokens, {details.cached_tokens} of them"
                " cached,",
                end=" ",
            )
            print(f"{details.recomputed_tokens} recomputed")


if __name__ == "__main__":
    main()
