"""The laboratory's benchmarks run on a tiny model and report what they promise; their figures are
not looked at."""

from itertools import pairwise
from types import SimpleNamespace
from typing import cast

import pytest
import torch
import uvicorn
from typer.testing import CliRunner

from kvlinker.base.errors import InvalidRequestError, KVLinkerError
from kvlinker.base.types.answers import Delta
from kvlinker.engines.contract.contract import Failed, Finished, GenerationEvent
from kvlinker.engines.embedded.attention.kernels import native_attention
from kvlinker.engines.embedded.model_loading import prepare_model
from kvlinker.engines.native.peaks import peaks
from kvlinker.llm import LLM
from kvlinker.quality.bench.harness.benchmark import declared_benchmarks, find_benchmark
from kvlinker.quality.bench.harness.measurement import Workload
from kvlinker.quality.bench.harness.shapes import byte_tokenizer
from kvlinker.quality.bench.harness.subject import MeasuredModel
from kvlinker_lab import neighbour
from kvlinker_lab.agent_replays import run_agent_replays
from kvlinker_lab.attention import Case, run_attention
from kvlinker_lab.cli import app
from kvlinker_lab.conversation import conversation_prompts, run_conversation
from kvlinker_lab.isolation import run_isolation
from kvlinker_lab.memory import run_memory
from kvlinker_lab.neighbour import run_neighbour
from kvlinker_lab.overhead import run_overhead
from kvlinker_lab.products import doubts, run_products
from kvlinker_lab.serving import serve_llm
from kvlinker_lab.steps import run_steps
from kvlinker_lab.tool_calls import run_tool_calls, tasks
from kvlinker_lab.walk import run_walk
from tests.toy_models import loaded_model, tiny_model


@pytest.fixture
def subject():
    return MeasuredModel("llama", "kvlinker-lab …", loaded_model("llama"), {"repeat": 1})


def test_benchmarks_are_commands_and_listed_without_being_imported() -> None:
    names = (
        "agent-replays agents attention codecs contention conversation creation fleet handovers"
        " isolation load memory neighbour overhead peers products recognition roofline router soak"
        " soft-prefaces steps store tool-calls walk"
    )
    declared = declared_benchmarks("kvlinker_lab")
    assert " ".join(declared) == names
    listed = CliRunner().invoke(app, ["--help"])
    for name, one in declared.items():
        assert name in listed.output
        assert (find_benchmark(name, "kvlinker_lab").run.__doc__ or "").startswith(one.summary)
    with pytest.raises(
        InvalidRequestError,
        match="Unknown benchmark 'ttft'; known are agent-replays, agents, attention",
    ):
        find_benchmark("ttft", "kvlinker_lab")


def test_conversations_are_held_in_every_way(subject):
    rows = run_conversation(subject, Workload(2, 20, 30), turns=3, policy="naive", repeat=1).rows
    assert [(row["case"], row["way"]) for row in rows] == [
        ("3 turns of 30 tokens", "reuse"),
        ("3 turns of 30 tokens", "no reuse"),
        ("3 turns of 30 tokens", "each token once"),
        ("the same prompt again", "reuse"),
        ("the same prompt again", "no reuse"),
        ("the same prompt again", "its fresh tokens alone"),
        ("new documents", "reuse"),
        ("new documents", "no reuse"),
    ]
    assert all(row["seconds"] > 0 for row in rows)
    assert rows[0]["ratio_to_reuse"] == rows[3]["ratio_to_reuse"] == 1


def test_the_walk_of_requests_is_counted(subject):
    cold, warm = run_walk(subject, repeat=1).rows
    assert [cold["case"], warm["case"]] == ["cold", "warm"]
    for row in (cold, warm):
        assert 0 < row["files"] < row["functions"] < row["calls"]
        assert row["returns"] < row["calls"]
        assert 0 < row["types"] < row["functions"]
        assert row["cpu_ms"] > 0


@pytest.mark.skipif(peaks() is None, reason="no native code for this processor")
def test_products_are_held_against_the_processors_peaks():
    report = run_products([1, 30], mib=6, repeat=1)
    assert [(row["weights"], row["rows"]) for row in report.rows] == [
        (form, rows) for rows in (1, 30) for form in ("bf16", "int8", "int8, inputs in 16", "int4")
    ]
    assert all(row["of_peak"] > 0 for row in report.rows)
    assert report.machine["peak_tflop_per_s"] > 0
    on_the_processor = run_products([2], mib=6, repeat=1, cpu_time=True)
    assert all(row["ms"] > 0 and row["of_peak"] is None for row in on_the_processor.rows)


def test_more_than_a_peak_is_doubted():
    assert doubts([0.5, None, 1.0]) == []
    assert doubts([]) == []
    (told,) = doubts([0.5, 1.234])
    assert told.startswith("1.23 of the peak")


@pytest.mark.skipif(native_attention() is None, reason="no native attention")
@pytest.mark.parametrize(
    ("family", "amx"),
    [("llama", False), ("llama", True), ("qwen3_5-states", False), ("minicpm3-latents", False)],
)
def test_steps_in_native_code_are_held_against_the_modules(family, amx, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    loaded = prepare_model(tiny_model(family).bfloat16(), byte_tokenizer())
    measured = MeasuredModel(family, "kvlinker-lab …", loaded, {})
    rows = run_steps(measured, [1, 3], context_tokens=20, steps=2).rows
    assert [row["requests"] for row in rows] == [1, 3]
    assert all(row["modules_ms"] > 0 and row["outside_ms"] > 0 for row in rows)


def test_steps_that_native_code_does_not_compute_are_refused():
    with pytest.raises(InvalidRequestError, match="float32"):
        run_steps(MeasuredModel("llama", "", loaded_model("llama"), {}), [1])


@pytest.mark.skipif(
    peaks() is None or native_attention() is None, reason="no native attention for this processor"
)
def test_attention_is_held_against_the_processors_peaks():
    cases = Case(1, 5, group=2, dim=64, segments=1), Case(3, 1, group=2, dim=64, segments=8)
    report = run_attention(cases, mib=8, repeat=1)
    assert [(row["requests"], row["queries"], row["segments"]) for row in report.rows] == [
        (1, 5, 1),
        (3, 1, 8),
    ]
    assert all(row["of_peak"] > 0 for row in report.rows)
    assert report.machine["read_gb_per_s"] > 0


def test_requests_over_the_same_segments_see_each_key_once():
    views = list(Case(3, 1, group=2, dim=64, segments=8).views())
    for request in range(3):
        seen = sorted(view.start for view in views if view.rows.start == request)
        assert seen == list(range(0, 4096, 512))


def test_turns_of_a_conversation_begin_with_the_one_before():
    prompts = conversation_prompts(Workload(2, 20, 30), 3, 300, seed=1)
    assert [len(prompt) for prompt in prompts] == [70, 100, 130]
    for before, after in pairwise(prompts):
        assert after.tokens[: len(before)].tolist() == before.tokens.tolist()
        assert after.chunks == before.chunks


def test_memory_is_set_against_the_kv(subject):
    (row,) = run_memory(subject, Workload(4, 100, 5), ["naive"]).rows
    assert row["kv_mb"] == pytest.approx(405 * subject.loaded.kv_bytes_per_token / 1e6)
    assert row["ratio_to_kv"] == pytest.approx(row["peak_mb"] / row["kv_mb"])
    own = row["own_kv_mb"] * 1e6 / subject.loaded.kv_bytes_per_token
    assert 5 + 1 <= own < 405 / 2  # fresh tokens and its answer's, but not the chunks'


def test_a_neighbour_is_measured_alone_and_beside_a_prompt(subject):
    whole, cut = (
        run_neighbour(subject, [300], most_tokens=most, slo_tpot=1e-3).rows[0]
        for most in (10_000, 2)
    )
    assert whole["prefill_s"] > 0
    assert whole["worst_ms"] >= whole["beside_p99_ms"] >= whole["beside_p50_ms"] > 0
    assert whole["worst_ratio"] == pytest.approx(whole["worst_ms"] / whole["idle_ms"])
    assert cut["prefill_s"] is None or cut["steps"] <= 2


class _Failing:
    """An LLM and its engine, of whose requests the neighbour, or the one beside it, ends too
    early."""

    max_model_len = 4096

    def __init__(self, ends: str, event: GenerationEvent) -> None:
        self.engine = self
        self._ends, self._event = ends, event
        self._asked = 0
        self.cancelled = 0

    def generate(self, request, sink):
        self._asked += 1
        if self._asked == 1:
            tokens = neighbour.IDLE_TOKENS + 4 if self._ends == "beside" else 5
            for _ in range(tokens):
                sink(0, cast(Delta, object()))
        if self._asked == 2 or self._ends == "neighbour":
            sink(0, self._event)
        return self

    def cancel(self):
        self.cancelled += 1


@pytest.mark.parametrize("ends", ["neighbour", "beside"])
def test_a_request_that_fails_is_no_figure(ends, monkeypatch):
    monkeypatch.setattr(neighbour, "first_token", lambda *_: 0.0)
    llm = _Failing(ends, Failed(KVLinkerError("no memory")))
    with pytest.raises(KVLinkerError, match="no memory"):
        neighbour._row(cast(LLM, llm), 300, 100)
    assert llm.cancelled == (2 if ends == "beside" else 1)


def test_a_neighbour_whose_answer_is_over_is_told(monkeypatch):
    monkeypatch.setattr(neighbour, "first_token", lambda *_: 0.0)
    llm = _Failing("neighbour", object.__new__(Finished))
    with pytest.raises(KVLinkerError, match="a shorter prompt"):
        neighbour._row(cast(LLM, llm), 300, 100)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_server_that_does_not_start_is_told(monkeypatch):
    async def fails(*_, **__):
        raise OSError("no port")

    monkeypatch.setattr(uvicorn.Server, "serve", fails)
    monkeypatch.setattr("kvlinker.doors.http.app.create_app", lambda *_: None)
    with (
        pytest.raises(KVLinkerError, match="did not start"),
        serve_llm(cast(LLM, SimpleNamespace(settings=None))),
    ):
        pass


BAD_ARGUMENTS = [
    ("products --rows a", "'a' is not a list of whole numbers"),
    ("products --rows 1,", "'1,' is not a list"),
    ("products --rows 0", "at least 1"),
    ("products --shape tiny", "No such option"),
    ("attention --queries 0", "at least 1"),
    ("attention --dims 63", "63 must be even"),
    ("roofline --model llama", "No such option"),
    ("router --shape tiny", "No such option"),
]


def test_bad_arguments_are_told(subtests):
    for arguments, told in BAD_ARGUMENTS:
        with subtests.test(arguments):
            run = CliRunner().invoke(app, arguments.split())
            assert run.exit_code == 2
            assert told in " ".join(run.output.split())


def test_agents_requests_are_replayed(subject):
    report = run_agent_replays(subject, ["aider"], ["off", "auto"], policy="naive", scale=0.01)
    assert [(row["implicit"], row["case"]) for row in report.rows] == [
        (setting, case)
        for setting in ("off", "auto")
        for case in (
            "first turn",
            "next turn",
            "after an edit in the middle",
            "another repository",
        )
    ]
    assert [row["read"] > 0 for row in report.rows[:4]] == [False, True, True, True]
    assert all(0 <= row["share"] < 1 for row in report.rows)
    *_, last = report.notes
    assert last.startswith("| aider | `auto` | 0% of ")


def test_tools_are_called_under_every_policy(subject):
    report = run_tool_calls(subject, ["naive", "full"], limit=2, offered=2)
    full, naive = report.rows
    assert (full["policy"], full["n"], full["same_call"], full["read"]) == ("full", 2, 1.0, 0.0)
    assert (naive["policy"], naive["n"], naive["recomputed"]) == ("naive", 2, 0.0)
    assert naive["read"] > 0.5


def test_each_task_offers_the_tool_that_it_needs_behind_a_system_prompt_of_its_own():
    several = list(tasks(32))
    assert several == list(tasks(32))
    for task in several:
        asked = task.messages[1]["content"]
        assert all(value in asked for value in task.arguments.values())
        assert [tool["function"]["name"] for tool in task.tools].count(task.name) == 1
    assert len({task.messages[0]["content"] for task in several}) > 20


def test_an_agent_that_is_not_known_is_told():
    run = CliRunner().invoke(app, ["agent-replays", "--agents", "vim"])
    assert run.exit_code == 2
    assert "'vim' is none of codex, claude-code" in " ".join(run.output.split())


def test_overhead_asks_the_same_both_ways(subject):
    rows = run_overhead(subject, Workload(2, 40, 5), "naive", repeat=2).rows
    assert [row["case"] for row in rows] == ["python", "http"]
    assert rows[0]["over_python_ms"] == 0


def test_isolation_compares_what_others_have_with_nothing(subject):
    rows = run_isolation(subject, lookups=12).rows
    assert [row["case"] for row in rows] == [
        "id, in Python",
        "id, over HTTP",
        "id, in a prompt",
        "content",
        "a kept answer's id, in a prompt",
        "a kept answer's text, in a prompt",
    ]
    for row in rows:
        assert row["unknown_us"] > 0 < row["foreign_us"]
        assert 0 <= row["p"] <= 1
