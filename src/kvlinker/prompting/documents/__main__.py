"""``python -m kvlinker.prompting.documents SUFFIX`` reads a file from standard input, and writes a
line of JSON: its ``text`` and ``encoding``, or why there is none in ``no_text``."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from kvlinker.base.system import limit_memory
from kvlinker.prompting.documents import NoTextError, read_document

MOST_MEMORY_BYTES = 8 * 2**30
"""The most memory for a file that unpacks to far more than its size, before it is refused."""


def main(suffix: str) -> None:
    """Read the file, within ``MOST_MEMORY_BYTES``."""
    limit_memory(MOST_MEMORY_BYTES)
    answer: dict[str, str | None]
    try:
        answer = asdict(read_document(sys.stdin.buffer.read(), suffix))
    except NoTextError as error:
        answer = {"no_text": str(error)}
    print(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1])
