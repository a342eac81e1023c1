"""Ask how a prompt is linked: which parts come from chunks, what each layer recomputes, and the
work that is saved."""

from kvlinker import LLM

CHUNKS = [
    "Mira Holt lives in Varna. She works as a baker.\n\n",
    "Tom Reyes lives in Oslo. He works as a pilot.\n\n",
]


def main() -> None:
    with LLM() as llm:
        mira, tom = llm.generate_context_cache(CHUNKS)
        messages = [
            {"role": "user", "content": [tom, mira, "Question: Where does Tom Reyes live?"]}
        ]
        for policy in ("legolink-4", "query-10", "cacheblend-20"):
            explanation = llm.explain(messages, policy=policy)
            print(policy)
            for segment in explanation.segments:
                source = (
                    f"chunk {segment.context_cache}" if segment.kind == "chunk" else "fresh text"
                )
                print(f"  {segment.start:3} to {segment.start + segment.tokens:3}: {source}")
            for layers in explanation.layers:
                ranges = ", ".join(f"{begin} to {end}" for begin, end in layers.recomputed)
                print(f"  layers {layers.first} to {layers.last} recompute {ranges or 'nothing'}")
            cost = explanation.cost
            print(f"  {cost.flops / cost.full_flops:.0%} of a full prefill's FLOPs")


if __name__ == "__main__":
    main()
