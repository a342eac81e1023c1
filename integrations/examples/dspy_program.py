"""A DSPy program that knows nothing of kvlinker: its passages are recognised, and its answer's form
is enforced.

Run a server (`make serve`), then `python integrations/examples/dspy_program.py`. It needs `pip
install dspy`.
"""

from __future__ import annotations

import os
from typing import Literal

import dspy

URL = os.environ.get("KVLINKER_BASE_URL", "http://localhost:8000/v1")
PEOPLE = (("Tom Reyes", "Oslo"), ("Mira Holt", "Varna"), ("Ana Diaz", "Lima"))
PASSAGES = [
    "\n".join(f"{name} was seen in {city} on day {day} of the journey." for day in range(1, 10))
    for name, city in PEOPLE
]


class Place(dspy.Signature):
    """Answer by the passages."""

    passages: str = dspy.InputField()
    question: str = dspy.InputField()
    city: Literal["Lima", "Oslo", "Varna"] = dspy.OutputField()


class KVLinkerLM(dspy.LM):
    """Tells DSPy that the server enforces JSON schemas, so that signatures become some."""

    @property
    def supports_response_schema(self) -> bool:
        return True

    @property
    def supported_params(self) -> set[str]:
        return {*super().supported_params, "response_format"}


def main() -> None:
    options = {
        "extra_body": {"link": {"implicit": "auto"}},
        "temperature": 0,
        "max_tokens": 64,
        "cache": False,
    }
    model = KVLinkerLM("openai/default", api_base=URL, api_key="none", **options)
    program = dspy.Predict(Place)
    with dspy.context(lm=model, adapter=dspy.JSONAdapter(), track_usage=True):
        for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
            passages = "\n\n".join(PASSAGES[number] for number in order)
            answer = program(passages=passages, question="Where was Tom Reyes seen?")
            (usage,) = answer.get_lm_usage().values()
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            print(f"{answer.city}: {usage['prompt_tokens']} prompt tokens, {cached} of them cached")


if __name__ == "__main__":
    main()
