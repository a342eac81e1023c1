"""Known texts are found wherever they stand, and nothing else is."""

from __future__ import annotations

import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlinker.service.implicit import known as known_module
from kvlinker.service.implicit.known import WINDOW, Hashes, KnownTexts, WindowHash

ONE = "The red fox was seen near the old mill, says the miller's wife."
TWO = "The red fox was seen near the old mill, says the miller's wife. It ran when she came."
THREE = "Nobody saw the badger 🦡 that night, for it had rained since the early evening."


def knowing(*texts: str) -> KnownTexts:
    known = KnownTexts(WindowHash())
    for text in texts:
        known.add(text)
    return known


def found(known: KnownTexts, text: str) -> list[str]:
    return [text[begin:end] for begin, end in known.find(text)]


def test_texts_are_found_at_any_place_in_any_order() -> None:
    known = knowing(ONE, THREE)
    assert found(known, f"Context:\n{THREE}\n\n{ONE}\nQuestion?") == [THREE, ONE]
    assert found(known, f"{ONE}{THREE}") == [ONE, THREE]
    assert found(known, THREE) == [THREE]
    assert known.find("") == known.find("short") == []


def test_the_longest_is_found() -> None:
    assert found(knowing(ONE, TWO), f"🦡 {TWO} {ONE}") == [TWO, ONE]


def test_a_word_is_not_cut() -> None:
    known = knowing(ONE[:-1])  # without the full stop
    assert found(known, f"{ONE[:-1]}s") == []
    assert found(known, f"x{ONE}") == []
    assert found(known, f"-{ONE}") == [ONE[:-1]]


@pytest.mark.parametrize("place", [0, WINDOW - 1, WINDOW, len(ONE) - 1])
def test_a_text_that_differs_anywhere_is_another(place: int) -> None:
    other = ONE[:place] + "#" + ONE[place + 1 :]
    assert found(knowing(ONE), f"{other}\n{other}") == []


def test_a_collision_of_the_rolling_hash_does_not_hit() -> None:

    class Colliding(WindowHash):
        def of(self, text: str) -> Hashes:
            return np.zeros_like(super().of(text))

    known = KnownTexts(Colliding())
    known.add(ONE)
    assert found(known, f"{THREE} {THREE}") == []
    assert found(known, f"{THREE}\n{ONE}\n{THREE}") == [ONE]


def test_searching_is_bounded_whatever_the_texts_are() -> None:
    known = knowing(*("a" * length for length in range(WINDOW, 1500)))
    begun = time.thread_time()
    known.find("a" * 20_000)
    assert time.thread_time() - begun < 5


def test_what_was_used_last_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_module, "MOST_TEXTS", 2)
    known = knowing(ONE, TWO)
    assert found(known, ONE) == [ONE]
    known.add(THREE)
    assert len(known) == 2
    assert found(known, f"{ONE}\n{THREE}") == [ONE, THREE]
    assert found(known, TWO) == [ONE], "the longer one is forgotten"


@given(st.lists(st.text("ab \n🦡", min_size=40, max_size=60), min_size=1, max_size=4), st.data())
def test_what_is_found_is_known(texts: list[str], data: st.DataObject) -> None:
    known = knowing(*texts)
    pieces = st.sampled_from(texts) | st.text("ab \n🦡", max_size=50)
    text = "".join(data.draw(st.lists(pieces, max_size=6)))
    spans = known.find(text)
    assert all(text[begin:end] in texts for begin, end in spans)
    assert all(a_end <= b_begin for (_, a_end), (b_begin, _) in pairwise(spans))
