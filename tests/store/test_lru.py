"""The accounting of tiers: budgets, order of use, and pins."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvlinker.store.lru import PINNED_SHARE, LruIndex

KEYS = st.sampled_from("abcdefgh")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), KEYS, st.integers(1, 60)),
        st.tuples(st.just("touch"), KEYS),
        st.tuples(st.just("remove"), KEYS),
        st.tuples(st.just("pin"), st.frozensets(KEYS)),
    ),
    max_size=60,
)


@given(budget=st.integers(0, 200), steps=STEPS)
def test_budget_and_pins_hold(budget: int, steps: list[tuple]) -> None:
    index = LruIndex(budget)
    model: dict[str, int] = {}
    pinned: frozenset[str] = frozenset()
    for name, *arguments in steps:
        if name == "pin":
            (pinned,) = arguments
            index.set_pinned(pinned)
        elif name == "touch":
            assert index.touch(*arguments) == (arguments[0] in model)
        elif name == "remove":
            assert index.remove(*arguments) == (model.pop(*arguments, None) is not None)
        elif arguments[0] not in model and index.fits(arguments[1]):
            key, nbytes = arguments
            before = sum(size for held, size in model.items() if held in pinned)
            for gone, size in index.make_room(nbytes):
                assert model.pop(gone) == size
                if gone in pinned:
                    assert before > int(budget * PINNED_SHARE)
                    before -= size
            index.add(key, nbytes)
            model[key] = nbytes
        assert index.used_bytes == sum(model.values()) <= budget
        assert {key: index.nbytes(key) for key in index.keys()} == model  # noqa: SIM118
        assert len(index) == len(model)
        assert all((key in index) == (key in model) for key in "abcdefgh")


def test_pinned_keys_stay_while_others_come_and_go() -> None:
    index = LruIndex(100, pinned={"p", "q"})
    for key, nbytes in (("p", 30), ("a", 30), ("q", 30)):
        index.add(key, nbytes)
    assert index.keys() == ("a", "p", "q")
    assert index.make_room(40) == [("a", 30)]
    index.add("b", 40)
    assert not index.fits(41)
    assert index.make_room(40) == [("b", 40)]
    index.set_pinned(frozenset({"q"}))
    assert index.fits(70)
    assert index.make_room(60) == [("p", 30)]
    assert index.keys() == ("q",)


def test_pins_leave_a_share_to_others() -> None:
    index = LruIndex(100, pinned=set("pqr"))
    for key in "pqr":
        index.add(key, 30)
    assert index.fits(20)
    assert not index.fits(21)
    assert index.make_room(20) == [("p", 30)]
