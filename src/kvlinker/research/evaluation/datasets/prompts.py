"""What is asked behind the passages, where a data set brings no prompt of its own."""

from __future__ import annotations


def short_question(question: str) -> str:
    """A question whose answer is a few words (the wording follows LongBench's)."""
    return (
        "Answer the question based on the given passages. Only give me the answer and do not output any other "
        f"words.\n\nQuestion: {question.strip()}\nAnswer:"
    )
