"""What front ends know of workers' memory, whatever becomes of the reports."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlinker_vllm.protocol import worker_memory
from kvlinker_vllm.protocol.worker_memory import KnownMemory, MemoryReport, WorkerMemory

CHANGES = st.lists(
    st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 1), st.booleans()), max_size=6
)


@given(st.lists(st.tuples(CHANGES, st.sampled_from(["lost", "late", "told"])), max_size=30))
def test_who_gets_the_last_report_knows_everything(
    steps: list[tuple[list[tuple[str, int, bool]], str]],
) -> None:
    """Reports may be lost, or come late, and some changes were forgotten."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_memory, "MOST_CHANGES", 3)
        memory, front = WorkerMemory(workers=2), KnownMemory()
        late: list[MemoryReport] = []
        for changes, fate in steps:
            for key, rank, came in changes:
                memory.note(*([[(key, rank)], []] if came else [[], [(key, rank)]]))
            report = memory.changes(front.change_numbers())
            if fate == "late":
                late.append(report)
            elif fate == "told":
                front.note(report)
                for each in late:
                    front.note(each)
                late.clear()
                assert front.keys() == set(filter(memory.holds, "abcdefgh"))


def test_little_is_told_where_much_is_known() -> None:
    memory, front = WorkerMemory(workers=1), KnownMemory()
    memory.note([(f"{n}", 0) for n in range(1000)], [])
    front.note(memory.changes(front.change_numbers()))
    memory.note([("new", 0)], [("7", 0)])
    report = memory.changes(front.change_numbers())
    assert (report.whole, report.held, report.gone) == (False, ("new",), ("7",))


@pytest.mark.parametrize("known", [None, 3, "x", {"a": 1}, [], {"run": None}])
def test_who_knows_nothing_of_this_run_is_told_everything(known: object) -> None:
    memory = WorkerMemory(workers=1)
    memory.note([("a", 0)], [])
    report = memory.changes(known)
    assert report.whole
    assert report.held == ("a",)
    assert memory.changes({report.run: "1"}).whole
    assert memory.changes({report.run: 99}).whole


def test_several_runs_are_known_at_once() -> None:
    front = KnownMemory()
    for number in range(2):
        memory = WorkerMemory(workers=1)
        memory.note([(f"{number}", 0)], [])
        front.note(memory.changes(front.change_numbers()))
    assert front.keys() == {"0", "1"}
