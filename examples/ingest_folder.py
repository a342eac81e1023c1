"""Split the text files of a folder into chunks, cache them under their names, and find them again
by metadata.

With a ``state_dir``, the KV lies on the disk: the next program that names the same folder computes
nothing again.
"""

import sys
from pathlib import Path

from kvlinker import LLM

NOTES = Path(__file__).parent / "notes"


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else NOTES
    with LLM(state_dir=Path(sys.argv[2]) if len(sys.argv) > 2 else None) as llm:
        for file in sorted(folder.rglob("*.md")):
            chunks = llm.split(file.read_text(), method="markdown", max_tokens=64)
            caches = llm.generate_context_cache(
                chunks, ttl=24 * 3600, name=file.name, metadata={"source": file.name}
            )
            print(
                f"{file.name}: {len(caches)} chunks, {sum(cache.tokens for cache in caches)} tokens"
            )
        usage = llm.caches_usage()
        print(f"kept: {usage.kept.chunks} chunks, {usage.kept.bytes} bytes of KV")
        people = llm.list_caches(metadata={"source": "people.md"}, order="asc").items
        answer = llm.chat_completion(
            [{"role": "user", "content": [*people, "Question: Where does Tom Reyes live?"]}],
            max_tokens=8,
            temperature=0,
        )
        print(answer.text)


if __name__ == "__main__":
    main()
