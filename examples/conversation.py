"""Cache three chunks once, and ask about them in any order, in one process and with the model in
the box."""

from kvlinker import LLM

FACTS = [
    "Mira Holt lives in Varna. She works as a baker.\n\n",
    "Tom Reyes lives in Oslo. He works as a pilot.\n\n",
    "Ada Lund lives in Turin. She works as a nurse.\n\n",
]
QUESTIONS = ["Where does Tom Reyes live?", "Where does Mira Holt live?"]


def main() -> None:
    with LLM(
        policy="legolink-4"
    ) as llm:  # LLM("path-or-hub-id") takes any model that can be linked
        mira, tom, ada = llm.generate_context_cache(FACTS, ttl=3600)
        for order in ([mira, tom, ada], [ada, tom, mira]):
            for question in QUESTIONS:
                answer = llm.chat_completion(
                    [{"role": "user", "content": [*order, f"Question: {question}"]}],
                    max_tokens=8,
                    temperature=0,
                )
                usage = answer.usage
                print(f"{question} {answer.text}")
                print(
                    f"  {usage.cached_tokens} tokens cached, {usage.recomputed_tokens} recomputed,",
                    end=" ",
                )
                print(
                    f"{usage.fresh_tokens} fresh; first token after"
                    f" {1000 * answer.timing.ttft:.0f} ms"
                )


if __name__ == "__main__":
    main()
