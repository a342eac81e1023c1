"""What a sequence counts as its own to compute, each time that it gets slots."""

import numpy as np

from kvlinker.engines.embedded.requests.sequence import TokenSequence
from kvlinker.prompting.segments import ReusedPrefix


def reusing(count):
    """A sequence for a prompt of 60 tokens that reuses so many."""
    reused = ReusedPrefix(count, np.arange(count), {}, ())
    return TokenSequence(np.arange(60), [(count, 60)], reused=reused, most_tokens=70)


def test_what_was_gone_before_the_prompt_was_computed_stays_missed():
    sequence = reusing(40)
    sequence.adopt(25, None)
    assert sequence.missed == 15
    sequence.restart()  # others took its slots
    sequence.adopt(40, None)
    assert sequence.missed == 15, "it has computed these itself"


def test_what_is_gone_after_the_prompt_was_computed_is_not_missed():
    sequence = reusing(40)
    sequence.adopt(40, None)
    sequence.append(7)
    sequence.restart()
    sequence.adopt(0, None)
    assert sequence.missed == 0
    assert sequence.pending == [(0, 60), (60, 61)], "all is computed again all the same"
