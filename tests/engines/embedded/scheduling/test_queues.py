"""Lines of requests: what comes before and after each, against counting all of them."""

from hypothesis import given
from hypothesis import strategies as st

from kvlinker.engines.embedded.scheduling.queues import Lines, latest_first, set_turn
from tests.engines.embedded.fake_runner import BackgroundWork, ChunkWork, Work
from tests.properties import examples

KINDS = (Work, ChunkWork, BackgroundWork)

ARRIVALS = st.lists(
    st.tuples(
        st.sampled_from(KINDS),
        st.sampled_from("xy"),
        st.booleans(),
        st.integers(0, 20),  # arrival
        st.integers(0, 20),  # seconds of its prompt
    ),
    min_size=2,
    max_size=30,
)


def arrived(number, kind, tenant, urgent, arrival, seconds):
    work = kind(1, urgent=urgent, tenant=tenant)
    work.number, work.arrived = number, float(arrival)
    work.prompt_seconds = work.seconds_left = float(seconds)
    set_turn(work)
    return work


def alike(one, other):
    return (one.kind, one.tenant, one.urgent) == (other.kind, other.tenant, other.urgent)


def comes_before(one, other):
    return alike(one, other) and (one.due, one.number) < (other.due, other.number)


@examples(60)
@given(ARRIVALS, st.randoms(use_true_random=False))
def test_lines_count_as_looking_at_all_does(arrivals, random):
    lines = Lines()
    here: list[Work] = []
    for number, arrival in enumerate(arrivals):
        work = arrived(number, *arrival)
        before = [other.seconds_left for other in here if comes_before(other, work)]
        assert abs(lines.seconds_before(work) - sum(before)) < 1e-9
        backlogs = {
            other: other.backlog + work.seconds_left * comes_before(work, other) for other in here
        }
        lines.add(work)
        later = any(comes_before(work, other) for other in here)
        assert lines.delay(work, work.seconds_left) == (later and work.seconds_left > 0)
        assert all(other.backlog == backlog for other, backlog in backlogs.items())
        here.append(work)
        progressing = random.choice(here)
        lines.note_left(progressing, progressing.seconds_left / 2)
        if random.random() < 0.3:
            leaving = here.pop(random.randrange(len(here)))
            lines.remove(leaving)
        turn = random.uniform(0, 60)
        until = sum(other.seconds_left for other in here if other.turn <= turn)
        assert abs(lines.seconds_until(turn) - until) < 1e-9
        lines.check_integrity(here)
        answers = {other for other in here if type(other) is Work and other.tenant == "x"}
        assert set(lines.answers_of("x")) == answers
    for work in latest_first(here):
        lines.remove(work)
        assert not lines.delay(work, 1.0), "nobody is left behind it"
    lines.check_integrity([])
