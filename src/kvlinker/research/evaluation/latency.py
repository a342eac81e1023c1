"""Time to first token, measured as a user of ``LLM`` would."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

from kvlinker.llm import LLM, Message
from kvlinker.research.evaluation.answers import ask
from kvlinker.research.evaluation.examples import Question

REPEAT = 3

Key = TypeVar("Key", bound=Hashable)


def first_token_times(
    llm: LLM, forms: Mapping[str, Question], policies: Sequence[str], *, repeat: int = REPEAT
) -> dict[tuple[str, str], float]:
    """Median seconds from asking to the first token, by (form, policy), with all chunks cached.

    ``forms``: one question as it is asked, by name, such as one for each way of cutting its context. Includes building
    the prompt. Everything takes its turn, see ``time_in_turn``. Raises what ``LLM.chat_completion`` does.
    """

    def asking(prompt: Sequence[Message], policy: str) -> Callable[[], object]:
        return lambda: llm.chat_completion(prompt, policy=policy, max_tokens=1, temperature=0)

    asked = {form: ask(llm, question.passages, question.question, one_by_one=False) for form, question in forms.items()}
    return time_in_turn(
        {(form, policy): asking(prompt, policy) for form, prompt in asked.items() for policy in policies},
        repeat=repeat,
    )


def time_in_turn(competitors: Mapping[Key, Callable[[], object]], *, repeat: int) -> dict[Key, float]:
    """Median seconds of each over ``repeat`` rounds, after one that does not count.

    All take their turn in every round, so that a busy moment hits all alike, and every other round goes backwards, so
    that none always follows the same one.
    """
    taken: dict[Key, list[float]] = {key: [] for key in competitors}
    order = list(competitors)
    for turn in range(repeat + 1):
        for key in order:
            begin = time.perf_counter()
            competitors[key]()
            if turn:
                taken[key].append(time.perf_counter() - begin)
        order.reverse()
    return {key: statistics.median(seconds) for key, seconds in taken.items()}
