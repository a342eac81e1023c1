"""The policy that takes chunks' KV for their places in the row of chunks."""

from dataclasses import replace

import pytest

from kvlinker.base.types.chunks import LAST_PLACE, Chunk, Origin
from kvlinker.linking import EmptyLibrary, Evidence, parse_policy
from kvlinker.prompting.segments import CachedSegment, FreshSegment, Prompt

ROW = parse_policy("row")
CHUNKS = tuple(Chunk((10 + index, 20, 30), prefix=(1, 2)) for index in range(6))
PROMPT = Prompt((FreshSegment((1, 2)), *map(CachedSegment, CHUNKS), FreshSegment((3,))))


class Shelf(EmptyLibrary):
    """A library that has these chunks."""

    def __init__(self, *known):
        self.known = known

    def has(self, chunk):
        return chunk in self.known


def shelf(*places):
    """A library that has all chunks at these places."""
    return Shelf(*(replace(chunk, place=place) for chunk in CHUNKS for place in places))


def placed(library, prompt=PROMPT):
    return [chunk.place for chunk in ROW.arrange(prompt, library).chunks]


def selected(prompt):
    """Which chunks are computed again; of none only a part is."""
    mask = ROW.select(prompt, Evidence())
    found = [set(mask[span.start : span.end].tolist()) for span in prompt.spans]
    assert all(len(each) == 1 for each in found)
    return [each == {True} for each in found]


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ((1, 2, 3), [0, 1, 2, 3, 3, 3]),
        ((1,), [0, 1, 1, 1, 1, 1]),
        ((3,), [0, 0, 0, 3, 0, 0]),
        ((1, 3), [0, 1, 1, 3, 1, 1]),
        (range(1, LAST_PLACE + 1), [0, 1, 2, 3, 4, 5]),
        ((), [0] * 6),
    ],
)
def test_each_chunk_gets_its_place_or_the_last_one_of_shorter_rows(stored, expected):
    assert placed(shelf(*stored)) == expected


def test_chunks_without_kv_for_a_later_place_are_computed_in_full():
    arranged = ROW.arrange(PROMPT, Shelf(replace(CHUNKS[2], place=2)))
    assert selected(arranged) == [False, True, False, True, True, True]
    assert selected(ROW.arrange(PROMPT, shelf(1, 2, 3))) == [False] * 6


def test_the_last_place_stands_for_all_later_ones():
    chunks = [Chunk((index, 20), prefix=(1, 2)) for index in range(LAST_PLACE + 3)]
    stored = (replace(chunk, place=at) for chunk in chunks for at in range(1, LAST_PLACE + 1))
    prompt = Prompt((FreshSegment((1, 2)), *map(CachedSegment, chunks)))
    assert placed(Shelf(*stored), prompt) == [*range(LAST_PLACE + 1), LAST_PLACE, LAST_PLACE]


def test_no_kv_at_a_later_place_passes_for_exact():
    arranged = ROW.arrange(PROMPT, shelf(1))
    assert [span.exact for span in arranged.spans] == [True] + [False] * 5


def test_the_first_chunk_is_linked_behind_another_text_than_its_own():
    prompt = Prompt((FreshSegment((7, 8, 9)), *PROMPT.segments[1:]))
    assert placed(shelf(1, 2, 3), prompt)[:2] == [0, 1]
    assert selected(prompt)[0] is False


def test_what_a_conversation_gave_its_kv_keeps_it():
    answer = replace(CHUNKS[1], prefix=(1, 2, 5), origin=Origin.LINKED_ANSWER)
    prompt = PROMPT.with_chunks([CHUNKS[0], answer, *CHUNKS[2:]])
    arranged = ROW.arrange(prompt, shelf(1, 2, 3))
    assert arranged.chunks[1] == answer
    assert selected(arranged)[1] is False


def test_what_a_union_selects_is_computed_on_top():
    arranged = ROW.arrange(PROMPT, shelf(1, 2, 3))
    union = parse_policy("row+legolink-1")
    assert union.arrange(PROMPT, shelf(1, 2, 3)) == arranged
    mask = union.select(arranged, Evidence())
    assert mask.nonzero()[0].tolist() == [span.start for span in arranged.spans[1:]]
    assert union.needs.places
