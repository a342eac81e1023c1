"""The benchmarks run on a tiny model and report what they promise; their figures are not looked
at."""

import json
from dataclasses import replace
from io import StringIO

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.installing import install_command
from kvlinker.cli import app
from kvlinker.engines.embedded.execution.runner import Runner
from kvlinker.quality.bench.decode import SAMPLING, run_decode
from kvlinker.quality.bench.harness.measurement import Workload, in_turn, median_step
from kvlinker.quality.bench.harness.report import Report, Row
from kvlinker.quality.bench.harness.shapes import byte_tokenizer, random_model
from kvlinker.quality.bench.harness.subject import MeasuredModel
from kvlinker.quality.bench.ttft import PARTS, plot_ttft, run_ttft, scaling_exponents
from tests.toy_models import loaded_model, tiny_model


@pytest.fixture
def subject():
    return MeasuredModel("llama", "kvlinker bench …", loaded_model("llama"), {"repeat": 1})


def test_ttft_rows_say_what_was_measured(subject):
    report = run_ttft(
        subject,
        [Workload(2, 30, 5), Workload(3, 30, 5)],
        ["full", "naive", "legolink-4"],
        repeat=1,
        full_limit=70,
    )
    rows = {(row["context_tokens"], row["policy"], row["engine"]): row for row in report.rows}
    assert set(rows) == {
        (65, "full", "embedded"),
        (65, "full", "transformers"),
        (65, "naive", "embedded"),
        (65, "legolink-4", "embedded"),
        (95, "naive", "embedded"),
        (95, "legolink-4", "embedded"),
    }
    full, lego = rows[65, "full", "embedded"], rows[65, "legolink-4", "embedded"]
    assert full["speedup"] == 1
    assert lego["speedup"] == pytest.approx(full["ttft_ms"] / lego["ttft_ms"])
    assert (full["recomputed_tokens"], lego["recomputed_tokens"]) == (60, 4)
    assert rows[95, "naive", "embedded"]["speedup"] is None
    assert all(lego[f"{part}_ms"] > 0 for part in PARTS)
    assert 0 < lego["floor_ms"] < full["floor_ms"]
    assert report.machine["matmul_tflop_per_s"] > 0


def test_times_are_of_steps_that_nobody_watches(subject, monkeypatch):
    """Watched steps are computed by the model's modules, which takes longer."""
    watched, step = [], Runner.step

    def noted(self, batch, *args):
        watched.append(self.profile is not None)
        return step(self, batch, *args)

    monkeypatch.setattr(Runner, "step", noted)
    run_ttft(subject, [Workload(1, 30, 5)], ["naive"], repeat=2)
    assert watched.count(True) == 1
    assert not any(watched[: watched.index(True)])
    assert watched.index(True) >= 3


@pytest.mark.whole
def test_disk_tier_reads_from_disk(subject):
    (row, *_) = run_ttft(subject, [Workload(2, 30, 5)], ["naive"], repeat=1, tier="disk").rows
    assert row["tier"] == "disk"
    assert row["load_ms"] > 0
    with pytest.raises(InvalidRequestError, match="host, disk"):
        run_ttft(subject, [Workload(1, 30, 5)], ["naive"], repeat=1, tier="tape")


def test_ttft_of_vllm_names_its_command_and_how_to_install_it():
    result = CliRunner().invoke(app, ["bench", "ttft", "--engine", "vllm"])
    assert result.exit_code == 2
    assert "kvlinker bench ttft-vllm" in result.stderr
    assert install_command("vllm") in " ".join(result.stderr.split())


def test_transformers_takes_part_only_where_wanted(subject):
    rows = run_ttft(subject, [Workload(2, 30, 5)], ["full"], repeat=1, with_transformers=False).rows
    assert [row["engine"] for row in rows] == ["embedded"]


def test_competitors_take_turns_behind_a_warm_up():
    called: list[str] = []
    told: list[str] = []
    values = {"a": iter([100, 3, 1, 2]), "b": iter([100, 5, 5, 50])}

    def taking(name):
        def call():
            called.append(name)
            return next(values[name])

        return call

    def progress(what: str, done: int = 0, total: int | None = None, /) -> None:
        told.append(what)

    taken = in_turn({name: taking(name) for name in values}, repeat=3, progress=progress)
    assert taken == {"a": [3, 1, 2], "b": [5, 5, 50]}
    assert "".join(called) == "abbaabba"
    assert told[:3] == ["turn 0 of 3: a", "turn 0 of 3: b", "turn 1 of 3: b"]


def test_exponents_are_fitted_from_three_lengths_on():
    rows = [
        {"policy": "p", "engine": "e", "context_tokens": n, "ttft_ms": 3 * n**1.5}
        for n in (10, 100, 1000)
    ]
    assert scaling_exponents(rows) == {("p", "e"): pytest.approx(1.5)}
    assert scaling_exponents(rows[:2]) == {}


def test_decode_compares_formats_and_transformers(subject):
    subjects = {
        "auto": subject,
        "int4": replace(subject, loaded=loaded_model("llama", weights="int4")),
    }
    rows = run_decode(
        subjects, [1, 3], Workload(0, 1, 20), plain=tiny_model("llama"), steps=8, repeat=1
    ).rows
    assert [(row["case"], row["system"]) for row in rows] == [
        (case, system)
        for case in ("1 × 20", "3 × 20")
        for system in ("kvlinker auto", "kvlinker int4", "transformers")
    ]
    assert all(row["ms_per_step"] > 0 for row in rows)
    assert rows[0]["ratio"] == 1


def test_decode_tells_what_is_outside_of_the_model_by_what_requests_ask_for(subject):
    rows = run_decode(
        {"auto": subject}, [1, 2], Workload(0, 1, 20), sampling=tuple(SAMPLING), steps=6, repeat=1
    ).rows
    assert [(row["case"], row["sampling"]) for row in rows] == [
        (case, sampling) for case in ("1 × 20", "2 × 20") for sampling in SAMPLING
    ]
    for row in rows:
        assert row["outside_cpu_ms"] > 0
        assert 0 < row["outside_ms"] < row["ms_per_step"] * 5  # medians of different steps
        assert 0 < row["outside_%"] < 100


def test_decode_behind_shared_chunks_is_kvlinkers_alone(subject):
    (row,) = run_decode(
        {"auto": subject}, [3], Workload(2, 20, 4), policy="naive", steps=8, repeat=1
    ).rows
    assert (row["case"], row["system"]) == ("3 × 2 × 20 shared + 4", "kvlinker auto")
    assert row["ms_per_step"] > 0


def test_prompts_of_a_workload_share_their_chunks_alone():
    one, other = Workload(2, 20, 4).prompts(300, 2)
    assert one.chunks == other.chunks
    assert one != other


def test_a_step_brings_a_token_for_every_request():
    assert median_step([0.0, 0.1, 1.0, 1.1, 3.0, 3.1, 4.0], requests=2) == 1.0
    with pytest.raises(InvalidRequestError, match="smaller batches"):
        median_step([0.0, 0.1], requests=2)


def test_reports_become_json_and_plots(tmp_path):
    rows = [
        {
            "policy": policy,
            "engine": "embedded",
            "context_tokens": 100,
            "ttft_ms": ms,
            "speedup": 10 / ms,
        }
        for policy, ms in (("full", 10.0), ("naive", 2.0))
    ]
    report = Report("kvlinker bench ttft", {"cores": 2}, {"torch": "2"}, {"repeat": 1}, rows)
    report.write_json(tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_text()) == {
        "command": "kvlinker bench ttft",
        "machine": {"cores": 2},
        "versions": {"torch": "2"},
        "settings": {"repeat": 1},
        "results": rows,
    }
    plot_ttft(rows, tmp_path / "bars.png")
    plot_ttft([*rows, *(row | {"context_tokens": 200} for row in rows)], tmp_path / "lines.svg")
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "lines.svg").read_text()
    with pytest.raises(InvalidRequestError, match=r"plot\.xyz"):
        plot_ttft(rows, tmp_path / "plot.xyz")


def test_reports_are_printed_to_the_letter():
    """Mistral's chat template and names of tasks have brackets, which are no styles."""
    template = "[INST] {{ message }} [/INST]"
    rows: list[Row] = [{"task": "[/a]", "n": 1}, {"task": "[b] c"}]
    output = StringIO()
    report = Report("kvlinker bench quality", {}, {}, {"chat_template": template}, rows)
    report.print(Console(file=output, width=200))
    for text in (f"chat_template {template}", "[/a]", "[b] c"):
        assert text in output.getvalue()


def test_shapes_are_what_they_say():
    loaded = random_model("tiny", dtype=torch.float32, device=torch.device("cpu"))
    assert len(loaded.layers) == 4
    assert loaded.layers[0].kv_heads == 4
    with pytest.raises(InvalidRequestError, match="285m"):
        random_model("9b", dtype=torch.float32, device=torch.device("cpu"))


def test_the_byte_tokenizer_has_a_token_per_byte():
    tokenizer = byte_tokenizer()
    text = "añ日 x"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


BAD_ARGUMENTS = [
    (["ttft", "--shape", "9b"], "Unknown shape"),
    (["ttft", "--shape", "tiny", "--policies", "blend"], "Unknown policy"),
    (["ttft", "--shape", "tiny", "--chunks", "2,x"], "whole numbers"),
    (["ttft", "--shape", "tiny", "--chunks", "0"], "at least 1"),
    (["ttft", "--shape", "9b", "--plot", "ttft.pngg"], "Cannot write ttft.pngg: plots are"),
    (["decode", "--shape", "tiny", "--batches", ""], "whole numbers"),
    (["decode", "--shape", "tiny", "--sampling", "greedy"], "known are plain, drawn, json"),
    (["decode", "--shape", "tiny", "--formats", "int3"], "known are auto, bf16, int8, int4"),
]


def test_bad_arguments_end_with_one_clear_line(subtests):
    for arguments, message in BAD_ARGUMENTS:
        with subtests.test(arguments=arguments):
            result = CliRunner().invoke(app, ["bench", *arguments])
            assert result.exit_code == 2
            assert message in result.stderr


@pytest.mark.whole
def test_ttft_command_writes_what_it_prints(tmp_path):
    arguments = [
        "--shape",
        "tiny",
        "--chunks",
        "2",
        "--chunk-tokens",
        "20",
        "--repeat",
        "1",
        "--policies",
        "full,naive",
    ]
    files = ["--json", str(tmp_path / "r.json"), "--plot", str(tmp_path / "r.png")]
    result = CliRunner().invoke(app, ["bench", "ttft", *arguments, *files])
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "r.json").read_text())["results"]
    assert [row["policy"] for row in rows] == ["full", "naive", "full"]
    assert "speedup" in result.output
    assert (tmp_path / "r.png").exists()


def test_check_command_gives_a_verdict(tmp_path):
    loaded = loaded_model("llama")
    loaded.model.save_pretrained(tmp_path)
    loaded.tokenizer.save_pretrained(tmp_path)
    result = CliRunner().invoke(app, ["check", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert result.output.count("passed") == 6
    assert "Steps of few tokens are computed by" in result.output
    assert CliRunner().invoke(app, ["check", str(tmp_path / "nothing")]).exit_code == 1
