"""OpenAI's client against a running server: an answer that is valid under a JSON schema, and one of
several texts.

Start a server with ``make serve`` first; a URL may be given as the argument.
"""

import json
import sys
from typing import Any

from openai import OpenAI

TEXT = (
    "Mira Holt lives in Varna. She works as a baker.\n\nTom Reyes lives in Oslo. He works as a"
    " pilot.\n\n"
)
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Lisbon", "Oslo", "Varna"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000"
    client = OpenAI(base_url=f"{url}/v1", api_key="none")

    def ask(question: str, **form: Any) -> str:
        answer = client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": f"{TEXT}Question: {question}"}],
            temperature=0,
            **form,
        )
        return answer.choices[0].message.content or ""

    schema = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
    print(json.loads(ask("Where does Tom Reyes live?", response_format=schema)))
    choice = {"structured_outputs": {"choice": ["baker", "pilot", "sailor"]}}
    print(ask("What does Mira Holt do?", extra_body=choice))


if __name__ == "__main__":
    main()
