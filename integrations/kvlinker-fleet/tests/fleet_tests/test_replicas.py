"""The index of who has which chunk where: it says what was reported last, whatever came before."""

from __future__ import annotations

from hashlib import sha256

from hypothesis import given
from hypothesis import strategies as st

from kvlinker_fleet.replicas import MEMORY_TIER, ResidencyIndex

KEYS = tuple(sha256(letter.encode()).hexdigest() for letter in "abcd")
DISK, REDIS, OBJECT = 1, 2, 3
SHARED = (REDIS, OBJECT)

PLACES = st.tuples(st.sampled_from([None, MEMORY_TIER, DISK]), st.sets(st.sampled_from(SHARED)))
REPORTS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.dictionaries(st.sampled_from(KEYS), PLACES),
        st.sets(st.sampled_from(KEYS)),
        st.sampled_from(["delta", "whole", "restart"]),
    ),
    max_size=15,
)

Place = tuple[int | None, set[int]]


@given(REPORTS)
def test_the_index_has_what_was_reported_last(
    reports: list[tuple[int, dict[str, Place], set[str], str]],
) -> None:
    index = ResidencyIndex()
    for tier in SHARED:
        index.share(tier)
    known: dict[int, dict[str, Place]] = {0: {}, 1: {}, 2: {}}
    for replica, chunks, gone, kind in reports:
        told = {key: place for key, place in chunks.items() if place != (None, set())}
        if kind == "restart":
            index.forget(replica)
        if kind != "delta":
            known[replica] = {}
        for key in gone:
            known[replica].pop(key, None)
        known[replica] |= told
        bits = {
            key: (sum(1 << t for t in shared) + (0 if own is None else 1 << own), (f"name {key}",))
            for key, (own, shared) in told.items()
        }
        index.report(replica, bits, gone, whole=kind == "whole")
        for each, has in known.items():
            assert index.count(each) == sum(own == MEMORY_TIER for own, _ in has.values())
    for key in KEYS:
        copies = index.copies(f"name {key}", 0.0)
        if not any(key in chunks for _, chunks, _, _ in reports):
            assert not len(copies.replicas)
            continue
        found = set(zip(copies.replicas.tolist(), copies.tiers.tolist(), strict=True))
        places = {each: has[key] for each, has in known.items() if key in has}
        assert found == {(each, own) for each, (own, _) in places.items() if own is not None}
        assert set(copies.shared) == set().union(*(shared for _, shared in places.values()))
    for replica in known:
        index.forget(replica)
    assert not index._copies
    assert not any(index._shared.values())


def believed(index: ResidencyIndex, name: str) -> list[int]:
    return index.copies(name, 1.0).believed


def test_what_was_sent_is_believed_until_the_replica_tells_of_it() -> None:
    index = ResidencyIndex()
    index.report(0, {KEYS[0]: (1 << MEMORY_TIER, ["old"])}, (), whole=True)
    for replica in (0, 1):
        index.believe(replica, ["old", "new"], 0.0)
    assert believed(index, "old") == believed(index, "new") == [0, 1]
    index.report(0, {}, (KEYS[0],), whole=False)
    assert believed(index, "old") == [1], "it is gone"
    assert believed(index, "new") == [0, 1], "nothing was told of it"
    index.report(0, {KEYS[1]: (1 << MEMORY_TIER, ["new"])}, (), whole=False)
    assert believed(index, "new") == [1]
    assert index.copies("new", 1.0).replicas.tolist() == [0]
    index.report(1, {KEYS[0]: (1 << DISK, ["old"])}, (), whole=False)
    assert believed(index, "old") == [], "it is on disk"
