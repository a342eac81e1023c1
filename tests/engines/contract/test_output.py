import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlinker.base.events import Event, Events
from kvlinker.base.types.answers import Delta, Timing, Usage
from kvlinker.base.types.call_marks import CallMarks
from kvlinker.base.types.sampling import SamplingParams
from kvlinker.engines.contract.contract import Finished, GenerationRequest
from kvlinker.engines.contract.output import Output, RequestClock, TextStream
from kvlinker.linking import parse_policy
from kvlinker.quality.bench.harness.shapes import byte_tokenizer
from tests.linking.test_policies import chunk_prompt
from tests.properties import examples

TOKENIZER = byte_tokenizer()
PLAIN = SamplingParams()


def ids_of(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def stream(text, stop=()):
    """Push a text byte by byte, as a byte-level model may; returns the pieces that came out, and
    the stream."""
    out = TextStream(TOKENIZER, stop)
    pieces = []
    for token in ids_of(text):
        pieces.append(out.push(token))
        if out.stopped:
            break
    pieces.append(out.finish())
    return pieces, out


TEXTS = ["plain", "naïve café", "日本語テキスト", "👩‍👩‍👧 family", "tab\tand\nnewline", " lead"]


def test_characters_come_out_whole(subtests):
    for text in TEXTS:
        with subtests.test(text=text):
            pieces, _ = stream(text)
            assert "".join(pieces) == text
            assert not any("�" in piece for piece in pieces)


def test_an_incomplete_character_ends_as_a_replacement():
    ids = TOKENIZER("é", add_special_tokens=False)["input_ids"][:1]
    out = TextStream(TOKENIZER, ())
    assert out.push(ids[0]) == ""
    assert out.finish() == "�"


def test_special_tokens_are_not_text():
    out = TextStream(TOKENIZER, ())
    assert out.push(TOKENIZER.bos_token_id) == ""
    assert out.finish() == ""


STOPPED = [
    ("hello world", ["wor"], "hello "),
    ("hello world", ["xyz"], "hello world"),
    ("aab", ["ab"], "a"),
    ("abababc", ["ababc"], "ab"),
    ("one END two", ["END", "one E"], ""),
    ("stop", ["stop"], ""),
    ("almost sto", ["stop"], "almost sto"),
    ("日本語", ["本"], "日"),
]


def test_nothing_behind_a_stop_string_comes_out(subtests):
    for text, stop, expected in STOPPED:
        with subtests.test(text, stop=stop):
            pieces, out = stream(text, stop)
            assert "".join(pieces) == expected
            assert out.stopped == (expected != text)
            assert out.stopped_by is None or out.stopped_by in stop


@examples(200)
@given(st.text("abé", max_size=30), st.lists(st.text("abé", min_size=1, max_size=4), max_size=3))
def test_stopping_equals_cutting_the_whole_text(text, stop):
    ends = [text.find(s) + len(s) for s in stop if s in text]
    expected = text
    if ends:
        seen = text[: min(ends)]
        expected = seen[: min(seen.find(s) for s in stop if s in seen)]
    pieces, _ = stream(text, stop)
    assert "".join(pieces) == expected


class Clock(RequestClock):
    """A clock that a test sets; ``now`` is what it shows."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr("kvlinker.engines.contract.output.time.perf_counter", lambda: self.now)
        super().__init__(submitted=self.now)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def test_timing_adds_up_to_the_time_that_passed(clock):
    clock.now = 101
    clock.loaded = clock.now
    clock.now = 103
    clock.started = clock.now
    clock.now = 110
    assert clock.timing(106.0) == Timing(load=1, queue=2, link=3, decode=4)
    assert clock.timing(None) == Timing(load=1, queue=2, link=7, decode=0)


def test_timing_of_a_request_that_did_not_get_that_far(clock):
    clock.now = 105
    assert clock.timing(None) == Timing(queue=5)
    clock.loaded = clock.now
    clock.now = 109
    assert clock.timing(None) == Timing(load=5, queue=4)


def test_a_start_that_is_told_late_lies_between_loading_and_the_first_token(clock):
    clock.now = 102
    clock.loaded = clock.now
    clock.started = clock.loaded + 50
    clock.now = 110
    assert clock.timing(105.0) == Timing(load=2, queue=3, link=0, decode=5)


def output_of(sampling=PLAIN, choice=0, tokenizer=TOKENIZER):
    """The output of a choice, its events, and what listeners are told."""
    told: list[tuple[object, ...]] = []
    listened: list[Event] = []
    events = Events()
    events.subscribe(listened.append)
    request = GenerationRequest(chunk_prompt(4), parse_policy("naive"), sampling, n=3)
    output = Output(
        request,
        lambda *event: told.append(event),
        choice=choice,
        clock=RequestClock(),
        tokenizer=tokenizer,
        events=events,
        broken=lambda: None,
    )
    return output, told, listened


@pytest.mark.parametrize(
    ("marks", "text", "ends"),
    [
        (CallMarks(("<call>",), anywhere=True), "a x<call>xx", [2]),
        (CallMarks(("<call>",), anywhere=True), "<calx", [4]),
        (CallMarks(('{"name": "f"',), anywhere=False), '{"xx', [3]),
        (CallMarks(('{"name": "fx"',), anywhere=False), '{"name": "fx", x', []),
        (None, "x<call>x", [0, 7]),
    ],
)
def test_stop_tokens_end_text_not_calls(marks, text, ends):
    (stop,) = ids_of("x")
    output, *_ = output_of(SamplingParams(stop_token_ids=(stop,), call_marks=marks))
    found = []
    for index, token in enumerate(ids_of(text)):
        if output.stops_at(token):
            found.append(index)
        output.push(token)
    assert found == ends


def test_stop_tokens_do_not_count_before_the_least_length():
    (stop,) = ids_of("x")
    output, *_ = output_of(SamplingParams(stop_token_ids=(stop,), min_tokens=2))
    found = []
    for _ in range(3):
        found.append(output.stops_at(stop))
        output.push(stop)
    assert found == [False, False, True]


def events_of(choice):
    """The events of an answer of two tokens, and what listeners are told of it."""
    output, told, listened = output_of(choice=choice)
    output.push(ord("a"))
    output.finish("length", Usage(4, 0, 3, 2), Delta("b", (ord("b"),)))
    return told, listened


@pytest.mark.parametrize("choice", [0, 2])
def test_the_sink_is_told_whose_events_they_are(choice):
    told, _ = events_of(choice)
    assert [number for number, _ in told] == [choice] * 3
    assert [type(event) for _, event in told] == [Delta, Delta, Finished]
    assert told[-1][1].usage == Usage(4, 0, 3, 2)


def test_listeners_count_the_prompt_with_the_first_choice():
    finished = [events_of(choice)[1][-1] for choice in range(3)]
    assert [event.cached_tokens + event.fresh_tokens for event in finished] == [7, 0, 0]
    assert [event.output_tokens for event in finished] == [2, 2, 2]


def test_a_token_is_decoded_once_for_all_who_ask(monkeypatch):
    tokenizer = byte_tokenizer()
    decoded = []
    decode = tokenizer.decode

    def noting(ids):
        decoded.append(ids)
        return decode(ids)

    monkeypatch.setattr(tokenizer, "decode", noting)
    outputs = [output_of(tokenizer=tokenizer)[0] for _ in range(2)]
    (token,) = ids_of("a")
    assert {output.token_text(token) for output in outputs for _ in range(3)} == {"a"}
    assert decoded == [[token]]
