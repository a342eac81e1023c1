"""A LangChain chain that knows nothing of kvlinker: its retrieved documents are reused in any
order.

Run a server that recognises them, `kvlinker serve --implicit auto`, then `python
examples/langchain_chain.py`; an argument is the server's address. It needs `pip install
langchain-openai`.
"""

from __future__ import annotations

import sys

from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

PEOPLE = (("Tom Reyes", "Oslo"), ("Mira Holt", "Varna"), ("Ana Diaz", "Lima"))
DOCUMENTS = [
    "\n".join(f"{name} was seen in {city} on day {day} of the journey." for day in range(1, 10))
    for name, city in PEOPLE
]


def main(url: str = "http://127.0.0.1:8000") -> None:
    prompt = ChatPromptTemplate.from_messages(
        [("system", "Answer by the context."), ("human", "{context}\n\nQuestion: {question}")]
    )
    model = ChatOpenAI(
        base_url=f"{url}/v1",
        api_key=SecretStr("none"),
        model="default",
        temperature=0,
        max_completion_tokens=8,
    )
    chain = prompt | model
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        context = "\n\n".join(DOCUMENTS[index] for index in order)
        answer = chain.invoke({"context": context, "question": "Where was Tom Reyes seen?"})
        usage = answer.usage_metadata or {}
        cached = usage.get("input_token_details", {}).get("cache_read", 0)
        print(f"{usage.get('input_tokens')} prompt tokens, {cached} of them cached")


if __name__ == "__main__":
    main(*sys.argv[1:])
