"""Every format from a file of its own, and what becomes of files that have none."""

import gzip
import json

import pytest

from kvlinker.base.errors import InvalidRequestError
from kvlinker.prompting.encoding import TextEncoder
from kvlinker.quality.bench.harness.shapes import byte_tokenizer
from kvlinker.quality.evaluation.contexts import ContextSplit, ContextSplitter
from kvlinker.quality.evaluation.datasets import load_dataset
from kvlinker.quality.evaluation.datasets.cacheblend import POOL, SHOTS
from kvlinker.quality.evaluation.datasets.facts import EXAMPLES
from kvlinker.quality.evaluation.datasets.retrieval import ANSWER, DEPTHS, NEEDLE
from kvlinker.quality.evaluation.examples import Continuation
from tests.quality.evaluation.conftest import questions_of

ENCODER = TextEncoder(byte_tokenizer())
SEMANTIC = ContextSplitter(ENCODER, ContextSplit.SEMANTIC, 100)
FIXED = ContextSplitter(ENCODER, ContextSplit.FIXED, 10)


@pytest.fixture
def write(tmp_path):
    def write_lines(name, *records):
        path = tmp_path / name
        path.write_text(
            "".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records)
        )
        return str(path)

    return write_lines


def test_own_records_are_taken_to_the_letter(write):
    path = write(
        "mine.jsonl",
        {
            "id": "x",
            "task": "t",
            "passages": ["one\n", "two\n"],
            "question": "Which?",
            "answers": "one",
            "metric": "rouge_l",
            "max_tokens": 7,
            "first_line": False,
            "choices": ["two", "one"],
            "wrong": "two",
        },
        {"passages": ["three"], "question": "Q", "answers": ["a", "", "b"]},
    )
    first, second = questions_of(load_dataset(path, SEMANTIC))
    assert (first.id, first.task, first.passages, first.answers) == (
        "x",
        "t",
        ("one\n", "two\n"),
        ("one",),
    )
    assert (first.metric, first.max_tokens, first.first_line) == ("rouge_l", 7, False)
    assert (first.choices, second.choices) == (("two", "one"), ())
    assert (first.wrong, second.wrong) == (("two",), ())
    assert (second.id, second.dataset, second.task, second.metric) == ("2", "mine", "mine", "f1")
    assert second.answers == ("a", "b")


def test_texts_may_have_any_line_ends(write):
    record = {"passages": ["one\u2028two", "\x85\x0cthree\r"], "question": "Q", "answers": ["a"]}
    digits = "9" * 5000
    dataset = load_dataset(
        write("mine.jsonl", json.dumps(record, ensure_ascii=False), f'{{"id": {digits}}}'), SEMANTIC
    )
    (question,) = questions_of(dataset)
    assert question.passages == tuple(record["passages"])
    (skipped,) = dataset.skipped
    assert skipped.where == "record 2"
    assert "not valid JSON" in skipped.reason


def test_choices_need_two_texts_and_the_answer_among_them(write):
    record = {"passages": ["one"], "question": "Q", "answers": ["a"]}
    given: tuple[list[str], ...] = (["a"], ["a", "a"], ["b", "c"], [], ["a", "b\nc"])
    dataset = load_dataset(
        write("mine.jsonl", record, *({**record, "choices": choices} for choices in given)),
        SEMANTIC,
    )
    (free,) = questions_of(dataset)
    assert (free.choices, free.metric) == ((), "f1")
    reasons = [skip.reason for skip in dataset.skipped]
    assert (
        reasons[0]
        == "'choices' is ['a'], but must be two texts or more, one of 'answers' among them"
    )
    assert [reason.split(",")[0] for reason in reasons[1:3]] == [
        "'choices' is ['a'",
        "'choices' is ['b'",
    ]
    assert reasons[3] == "'choices' is empty"
    assert reasons[4].endswith("but an answer ends with its first line ('first_line')")


def test_a_choice_is_right_or_wrong_and_may_have_several_lines(write):
    record = {
        "passages": ["one"],
        "question": "Q",
        "answers": ["a"],
        "choices": ["a", "b\nc"],
        "first_line": False,
    }
    (question,) = questions_of(load_dataset(write("mine.jsonl", record), SEMANTIC))
    assert (question.choices, question.metric) == (("a", "b\nc"), "exact_match")


def test_continuations_are_taken_to_the_letter_and_bad_ones_are_named(write):
    path = write(
        "prose.jsonl",
        {"passages": ["one ", "two"], "continuation": " three "},
        {"passages": ["one"], "continuation": "  "},
        {"passages": ["one"]},
        {"passages": [], "continuation": "three"},
        {"passages": ["one"], "continuation": 3},
        {"id": "x", "task": "t", "passages": ["one"], "continuation": "two"},
    )
    dataset = load_dataset(path, SEMANTIC)
    first, last = dataset.examples
    assert isinstance(first, Continuation)
    assert (first.passages, first.continuation) == (("one ", "two"), " three ")
    assert (first.id, first.dataset, first.task, first.metric) == ("1", "prose", "prose", "loss")
    assert (last.id, last.task) == ("x", "t")
    assert [(skip.where, skip.reason) for skip in dataset.skipped] == [
        ("record 2", "'continuation' is empty"),
        ("record 3", "'continuation' is missing"),
        ("record 4", "'passages' is empty"),
        ("record 5", "'continuation' is int, but must be text"),
    ]


def test_fixed_windows_cut_across_given_passages(write):
    path = write(
        "mine.jsonl", {"passages": ["12345678", "abcdefgh"], "question": "Q", "answers": ["a"]}
    )
    (example,) = load_dataset(path, FIXED).examples
    assert example.passages == ("12345678ab", "cdefgh")


def test_longbench_tasks_are_asked_and_measured_each_in_its_way(write):
    context = "A first paragraph, long enough.\n\n" * 6
    path = write(
        "lb.jsonl",
        {"input": "Who?", "context": context, "answers": ["x"], "dataset": "hotpotqa", "_id": "h1"},
        {"input": "", "context": context, "answers": ["a summary"], "dataset": "multi_news"},
        {
            "input": "Dialogue: x\nSummary:",
            "context": context,
            "answers": ["s"],
            "dataset": "samsum_e",
        },
        {"input": "", "context": context, "answers": ["x"], "dataset": "hotpotqa"},
        {"input": "Who?", "context": context, "answers": ["x"], "dataset": "of-mine"},
    )
    dataset = load_dataset(path, SEMANTIC)
    question, summary, shots, own = questions_of(dataset)
    assert (question.id, question.task, question.metric, question.max_tokens) == (
        "h1",
        "hotpotqa",
        "f1",
        32,
    )
    assert "Question: Who?" in question.question
    assert (summary.metric, summary.first_line) == ("rouge_l", False)
    assert shots.question == "Dialogue: x\nSummary:"
    assert own.metric == "f1"
    assert "".join(question.passages) == context
    assert all(len(passage) <= 100 for passage in question.passages)
    assert [(skip.where, skip.reason) for skip in dataset.skipped] == [
        ("record 4", "'input' is empty")
    ]


def test_cacheblend_passages_have_their_title_before_them(write):
    record = {
        "ctxs": [{"title": "T", "text": "first"}, {"title": "", "text": "second"}],
        "question": "Who?",
        "answers": [["x"], "y"],
    }
    path = write("musique.json", json.dumps([record, record | {"ctxs": [{"title": "T"}]}]))
    dataset = load_dataset(path, SEMANTIC)
    (example,) = questions_of(dataset)
    assert example.passages == ("T\n\nfirst\n\n", "second\n\n")
    assert example.answers == ("x", "y")
    assert dataset.skipped[0].reason == "'text' is missing"


def test_key_value_pairs_stand_in_passages_of_five(write, tmp_path):
    pairs = [[f"k{i}", f"v{i}"] for i in range(7)]
    path = tmp_path / "kv.jsonl.gz"
    path.write_bytes(
        gzip.compress(
            json.dumps({"ordered_kv_records": pairs, "key": "k6", "value": "v6"}).encode()
        )
    )
    (example,) = questions_of(load_dataset(str(path), SEMANTIC))
    assert [passage.count("\n") for passage in example.passages] == [5, 2]
    assert '"k6": "v6"\n' in example.passages[1]
    assert (example.answers, example.metric) == (("v6",), "exact_match")


def test_few_shot_examples_come_from_records_that_are_not_asked(write):
    path = write(
        "sam.jsonl",
        *({"question": f"A: {i}\r\nB: ok", "answer": f"sum {i}"} for i in range(POOL + 3)),
    )
    dataset = load_dataset(path, SEMANTIC)
    assert [example.answers for example in questions_of(dataset)] == [
        (f"sum {i}",) for i in range(POOL, POOL + 3)
    ]
    assert dataset == load_dataset(path, SEMANTIC)
    for example in questions_of(dataset):
        assert len(set(example.passages)) == SHOTS
        assert all(int(passage.split("sum ")[1]) < POOL for passage in example.passages)
        assert example.question.endswith("B: ok\nSummary: ")


def test_questions_with_an_answer_are_no_dialogues_to_summarise(write):
    """They have SAMSum's fields, and were once asked as if they were dialogues."""
    path = write(
        "quiz.jsonl",
        *({"question": f"What is {i}?", "answer": "a number"} for i in range(POOL + 3)),
    )
    with pytest.raises(InvalidRequestError, match="no known format") as caught:
        load_dataset(path, SEMANTIC)
    message = caught.value.message
    assert "its first record has the fields question, answer" in message
    assert "samsum (question, answer): 'question' is no dialogue of lines 'Name: words'" in message
    assert "passages (passages, question, answers): lacks passages, answers" in message
    assert message.index("samsum") < message.index("passages (") < message.index("kv-retrieval")


def test_few_dialogues_leave_none_to_ask(write):
    path = write("sam.jsonl", *({"question": f"A: {i}\nB: ok", "answer": "s"} for i in range(POOL)))
    with pytest.raises(InvalidRequestError, match=r"read as samsum,.*the first 20 are examples"):
        load_dataset(path, SEMANTIC)


def test_a_record_that_is_no_dialogue_is_left_out(write):
    dialogues = [{"question": f"A: {i}\nB: ok", "answer": f"sum {i}"} for i in range(POOL + 2)]
    others = [
        {"question": "Who?", "answer": "x"},
        {"question": " ", "answer": "x"},
        {"answer": "x"},
    ]
    for records in ([*dialogues, *others], [*others, *dialogues]):
        dataset = load_dataset(write("sam.jsonl", *records), SEMANTIC)
        assert [skip.reason for skip in dataset.skipped] == [
            "'question' is no dialogue of lines 'Name: words'",
            "'question' is empty",
            "'question' is missing",
        ]
    assert len(dataset.examples) == 2 + len(others)


def test_an_empty_question_with_an_answer_is_left_out_of_other_formats(write):
    asked = {"passages": ["p"], "question": "Q", "answers": ["a"], "answer": "a"}
    dataset = load_dataset(write("own.jsonl", asked, asked | {"question": ""}), SEMANTIC)
    assert (dataset.format, len(dataset.examples)) == ("passages", 1)
    assert [skip.reason for skip in dataset.skipped] == ["'question' is empty"]


def test_the_format_is_the_one_of_most_records_and_is_named(write):
    question = {"passages": ["p"], "question": "Q", "answers": ["a"]}
    text = {"passages": ["p"], "continuation": "goes on"}
    assert load_dataset(write("a.jsonl", text, question, question), SEMANTIC).format == "passages"
    assert load_dataset(write("b.jsonl", text, text, question), SEMANTIC).format == "continuations"
    assert load_dataset(write("c.jsonl", text | question), SEMANTIC).format == "passages"


def test_the_needle_goes_down_the_haystack(tmp_path):
    for name in ("b", "a"):
        (tmp_path / f"{name}.txt").write_text(
            " ".join(f"Sentence {i} of {name}." for i in range(60))
        )
    dataset = load_dataset(str(tmp_path), SEMANTIC)
    assert dataset.format == "needle"
    tasks = {example.task for example in dataset.examples}
    assert tasks == {"needle-500", "needle-1000", "needle-2000"}  # 2,300 bytes of text
    short = [example for example in dataset.examples if example.task == "needle-500"]
    assert len(short) == len(DEPTHS)
    places = []
    for example in short:
        text = "".join(example.passages)
        assert text.count(NEEDLE) == 1
        assert ANSWER in NEEDLE
        places.append(text.index(NEEDLE))
        before = text[: places[-1]].rstrip()
        assert not before or before.endswith(".")  # between sentences
        assert text.replace(NEEDLE, "").replace(" ", "").startswith("Sentence0ofa.")
    assert places == sorted(places)
    assert places[0] == 0
    assert places[-1] > 450
    assert [example.task for example in dataset.examples[:3]] == [
        "needle-500",
        "needle-1000",
        "needle-2000",
    ]


def test_records_that_are_no_examples_are_counted_and_the_others_used(write):
    good = {"passages": ["p"], "question": "Q", "answers": ["a"]}
    path = write(
        "mixed.jsonl",
        {"question": "Q"},
        good,
        "{broken",
        "[1]",
        good | {"answers": []},
        good | {"answers": ["  "]},
        good | {"passages": 3},
        good | {"metric": "bleu"},
        good | {"max_tokens": 0},
        good,
        good | {"metric": ["f1"]},
    )
    dataset = load_dataset(path, SEMANTIC)
    assert len(dataset.examples) == 2
    reasons = {skip.where: skip.reason for skip in dataset.skipped}
    assert reasons["record 1"] == "'passages' is missing"
    assert reasons["record 3"].startswith("not valid JSON")
    assert reasons["record 4"] == "a record must be an object, not list"
    assert reasons["record 5"] == reasons["record 6"] == "'answers' is empty"
    assert reasons["record 7"] == "'passages' holds int, but must hold texts"
    assert "bleu" in reasons["record 8"]
    assert "max_tokens" in reasons["record 9"]
    assert reasons["record 11"].startswith("'metric' is ['f1'], but must be one of")


def test_a_limit_counts_usable_examples(write):
    good = {"passages": ["p"], "question": "Q", "answers": ["a"]}
    path = write("mixed.jsonl", good, good | {"question": " "}, good, good)
    dataset = load_dataset(path, SEMANTIC, limit=2)
    assert [example.id for example in dataset.examples] == ["1", "3"]


UNUSABLE: list[tuple[str, str | bytes | None, str]] = [
    ("none.jsonl", None, "there is no such file or folder"),
    ("empty.jsonl", "", "has no usable example"),
    (
        "fields.jsonl",
        '{"text": "x"}\n',
        "of no known format: its first record has the fields text",
    ),
    ("list.json", "{}", "holds no list of records"),
    ("bad.json", "[1, ", "not valid JSON"),
    ("bytes.jsonl", b"\xff\xfe\x00", "not UTF-8"),
    ("zip.jsonl.gz", b"no gzip", "Cannot read"),
    (
        "bad.jsonl",
        '{"passages": [], "question": "Q", "answers": ["a"]}\n',
        "record 1: 'passages' is empty",
    ),
]


def test_data_that_cannot_be_used_is_refused_with_the_way_out(tmp_path, subtests):
    for name, content, message in UNUSABLE:
        with subtests.test(name):
            path = tmp_path / name
            if content is not None:
                path.write_bytes(content if isinstance(content, bytes) else content.encode())
            with pytest.raises(InvalidRequestError, match=message) as caught:
                load_dataset(str(path), SEMANTIC)
            assert name in caught.value.message


def test_a_folder_without_texts_is_no_haystack(tmp_path):
    with pytest.raises(InvalidRequestError, match=r"no \.txt files"):
        load_dataset(str(tmp_path), SEMANTIC)
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(InvalidRequestError, match=r"Cannot read a text: .*folder\.txt"):
        load_dataset(str(tmp_path), SEMANTIC)


def test_tasks_are_chosen_before_the_limit(write):
    def record(task, answer):
        return {"task": task, "passages": ["p\n"], "question": "q", "answers": answer}

    path = write(
        "mine.jsonl", record("a", "1"), record("b", "2"), record("c", "3"), record("b", "4")
    )
    chosen = load_dataset(path, SEMANTIC, tasks=("b", "c"), limit=2)
    assert [example.answers for example in questions_of(chosen)] == [("2",), ("3",)]
    with pytest.raises(InvalidRequestError, match="no usable example of d: its tasks are a, b, c"):
        load_dataset(path, SEMANTIC, tasks=("d",))
    broken = write("broken.jsonl", record("a", "1"), {"task": "d", "passages": ["p\n"]})
    with pytest.raises(
        InvalidRequestError, match=r"no usable example of d .*'question' is missing"
    ):
        load_dataset(broken, SEMANTIC, tasks=("d",))


def test_facts_are_asked_of_one_document_and_stand_in_all():
    dataset = load_dataset("facts", SEMANTIC)
    questions = questions_of(dataset)
    assert [each.task for each in questions[:3]] == ["facts-1", "facts-6", "facts-1"]
    assert len({each.digest for each in questions}) == len(questions) == 2 * EXAMPLES
    assert load_dataset("facts", SEMANTIC) == dataset
    for each in questions:
        (right,) = each.answers
        asked = each.question.split("founded ")[1].split(",")[0]
        assert [right in text for text in each.passages] == [
            asked in text for text in each.passages
        ]
        assert sum(right in text for text in each.passages) == 1
        assert [sum(name in text for text in each.passages) for name in each.wrong] == [1] * 3
