"""bench quality on a tiny model: rows, files, and complaints; its figures are not looked at, but
full's are exact."""

import json
import math
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from kvlinker.base.errors import InvalidRequestError
from kvlinker.cli import app
from kvlinker.quality.bench.harness.subject import MeasuredModel
from kvlinker.quality.bench.quality import QualityOptions, main_rows, plot_quality, run_quality
from kvlinker.quality.evaluation import examiner
from kvlinker.quality.evaluation.contexts import ContextSplit
from kvlinker.settings import load_settings
from tests.toy_models import loaded_model

FIELDS = {
    "policy",
    "dataset",
    "task",
    "n",
    "metric",
    "score",
    "ci_low",
    "ci_high",
    "vs_full",
    "vs_full_low",
    "vs_full_high",
    "recomputed_fraction",
    "agreement",
    "kl",
    "answer_agreement",
    "answer_kl",
    "main",
}
METRICS = [
    "exact_match",
    "f1",
    "rouge_l",
    "jaccard",
    "names",
    "exact_match_vs_full",
    "rouge_l_vs_full",
    "jaccard_vs_full",
    "answer_agreement",
    "answer_kl",
]
RECORDS = [
    {
        "task": task,
        "passages": [f"{i} is one. ", f"{i} is not two. "],
        "question": f"What is {i}?",
        "answers": ["one"],
    }
    for i, task in enumerate(["a", "b", "a", "b"])
]


@pytest.fixture
def subject():
    return MeasuredModel("llama", "kvlinker bench quality", loaded_model("llama"), {})


@pytest.fixture
def settings(tmp_path):
    return load_settings(max_model_len=300)


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "toys.jsonl"
    bad = [{"task": "a", "passages": [], "question": "Q", "answers": ["x"]}]
    long = [{"task": "a", "passages": ["x" * 400], "question": "Q", "answers": ["x"]}]
    path.write_text("".join(json.dumps(record) + "\n" for record in [*RECORDS, *bad, *long]))
    return str(path)


def test_rows_have_the_fixed_names_and_full_agrees_with_itself(subject, settings, data):
    options = QualityOptions((data,), ("full", "naive"), max_tokens=4)
    seen = []

    def progress(what, done=0, total=None):
        seen.append((what, done, total))

    measured = run_quality(subject, settings, options, progress=progress)
    rows = measured.report.rows
    assert all(set(row) == FIELDS for row in rows)
    assert [row["metric"] for row in rows[: len(METRICS)]] == METRICS
    assert {(row["dataset"], row["task"], row["n"]) for row in rows} == {
        ("toys", "a", 2),
        ("toys", "b", 2),
        ("toys", "all", 4),
    }
    for row in rows:
        assert row["ci_low"] <= row["score"] <= row["ci_high"]
        assert row["vs_full_low"] <= row["vs_full"] <= row["vs_full_high"]
        if row["policy"] == "full":
            assert (row["agreement"], row["kl"], row["recomputed_fraction"]) == (1, 0, 1)
            assert row["vs_full"] == row["vs_full_low"] == row["vs_full_high"] == 0
            assert row["score"] == 1 or not row["metric"].endswith("vs_full")
        else:
            assert row["kl"] > 0 == row["recomputed_fraction"]
    assert seen == [("examples", done, 5) for done in range(1, 6)]
    assert measured.report.settings["formats"] == {"toys": "passages"}
    reasons = [skip.reason for skip in measured.skipped]
    assert reasons[0] == "'passages' is empty"
    assert reasons[1].startswith("over the window")
    assert measured.report.settings["skipped"] == 2
    assert measured.report.settings["split"] == "semantic"
    assert [row["metric"] for row in main_rows(rows)] == ["f1"] * 6
    assert [example.task for example, _ in measured.answered] == ["a", "b", "a", "b"]
    assert [result.policy for result in measured.answered[0][1]] == ["full", "naive"]


def test_reruns_are_identical_and_full_need_not_be_asked_for(subject, settings, data):
    options = QualityOptions((data,), ("naive", "random-50"), max_tokens=4)
    first, again = (run_quality(subject, settings, options).report for _ in range(2))
    assert first.rows == again.rows
    with_full = run_quality(
        subject, settings, replace(options, policies=("naive", "random-50", "full"))
    ).report
    assert [row for row in with_full.rows if row["policy"] != "full"] == first.rows


def test_a_finished_run_is_read_back(subject, settings, data, tmp_path):
    path = tmp_path / "run.jsonl"
    options = QualityOptions((data,), ("full", "naive"), max_tokens=4, resume=path)
    first = run_quality(subject, settings, options).report
    written = path.read_text()
    again = run_quality(subject, settings, options).report
    assert again.rows == first.rows
    assert path.read_text() == written
    with pytest.raises(InvalidRequestError, match="max_tokens was 4 and is 5"):
        run_quality(subject, settings, replace(options, max_tokens=5))
    with pytest.raises(InvalidRequestError, match="generation_context was 'prefix' and is 'alone'"):
        run_quality(subject, load_settings(max_model_len=300, generation_context="alone"), options)
    with pytest.raises(InvalidRequestError, match="max_model_len was 300 and is 299"):
        run_quality(subject, load_settings(max_model_len=299), options)  # truncates elsewhere


def test_splits_and_contexts_change_what_is_asked(subject, data):
    def full_and_naive(split, context):
        settings = load_settings(max_model_len=500, generation_context=context)
        options = QualityOptions(
            (data,), ("full", "naive"), max_tokens=2, split=split, chunk_tokens=8
        )
        rows = run_quality(subject, settings, options).report.rows
        return [row["kl"] for row in rows if (row["task"], row["metric"]) == ("all", "f1")]

    kls = [
        full_and_naive(split, context)[1]
        for split in ContextSplit
        for context in ("prefix", "alone")
    ]
    assert len(set(kls)) == 4


def test_codecs_change_what_is_linked_and_not_what_is_computed(subject, settings, data):
    kls = {}
    for name in ("raw", "int8", "int4"):
        options = QualityOptions((data,), ("full", "naive"), max_tokens=2, codec=name)
        report = run_quality(subject, settings, options).report
        assert report.settings["codec"] == name
        kls[name] = {
            row["policy"]: row["kl"]
            for row in report.rows
            if (row["task"], row["metric"]) == ("all", "f1")
        }
    assert {found["full"] for found in kls.values()} == {0.0}
    assert len({found["naive"] for found in kls.values()}) == 3
    assert abs(kls["int8"]["naive"] - kls["raw"]["naive"]) < abs(
        kls["int4"]["naive"] - kls["raw"]["naive"]
    )


def test_chunks_that_run_at_once_are_exchanged_for_none(subject, settings, data, monkeypatch):
    options = QualityOptions((data,), ("naive",), max_tokens=2, codec="int4", concurrency=2)
    with pytest.raises(InvalidRequestError, match="The codec int4 exchanges chunks"):
        run_quality(subject, settings, options)
    monkeypatch.setattr(examiner, "_recode", pytest.fail)
    run_quality(subject, settings, replace(options, codec="raw"))


def test_settings_of_a_service_change_nothing(subject, settings, data, tmp_path, monkeypatch):
    """Neither does a measurement change the catalog that the service's servers share."""
    options = QualityOptions((data,), ("full", "naive"), max_tokens=4)
    measured = run_quality(subject, settings, options).report
    catalog = tmp_path / "shared.sqlite"
    for name, value in {
        "catalog_url": f"sqlite:///{catalog}",
        "require_certificate": "true",
        "tenant_quota_caches": "1",
        "implicit": "auto",
        "keep_answers": "answer",
        "max_answer_tokens": "1",
        "audit": "1",
        "quality_target": "0.9",
    }.items():
        monkeypatch.setenv(f"KVLINKER_{name.upper()}", value)
    assert run_quality(subject, settings, options).report.rows == measured.rows
    assert not catalog.exists()


def test_nothing_to_ask_is_an_error_that_says_why(subject, data):
    with pytest.raises(
        InvalidRequestError, match=r"No example could be asked\. 6 skipped: record 5: 'passages' is"
    ):
        run_quality(subject, load_settings(max_model_len=20), QualityOptions((data,), ("full",)))


def test_two_data_sets_cannot_have_one_name(subject, settings, data, tmp_path):
    (tmp_path / "other").mkdir()
    other = tmp_path / "other" / "toys.jsonl"
    other.write_text(json.dumps(RECORDS[0]))
    with pytest.raises(InvalidRequestError, match="called 'toys'"):
        run_quality(subject, settings, QualityOptions((data, str(other)), ("full",)))


def test_plots_have_a_panel_per_task(subject, settings, data, tmp_path):
    rows = main_rows(
        run_quality(
            subject, settings, QualityOptions((data,), ("full", "naive"), max_tokens=2)
        ).report.rows
    )
    plot_quality(rows, tmp_path / "q.svg")
    assert "<svg" in (tmp_path / "q.svg").read_text()
    plot_quality(rows[:2], tmp_path / "one.png")
    with pytest.raises(InvalidRequestError, match=r"q\.xyz"):
        plot_quality(rows, tmp_path / "q.xyz")


def test_the_command_writes_all_metrics_and_shows_the_main_one(data, tmp_path):
    arguments = [
        "bench",
        "quality",
        "--shape",
        "tiny",
        "--policies",
        "full,naive",
        "--dataset",
        data,
        "--limit",
        "2",
    ]
    files = ["--json", str(tmp_path / "q.json"), "--plot", str(tmp_path / "q.png")]
    result = CliRunner().invoke(app, [*arguments, "--max-tokens", "2", *files])
    assert result.exit_code == 0, result.output
    content = json.loads((tmp_path / "q.json").read_text())
    assert set(content) == {"command", "machine", "versions", "settings", "results"}
    assert {row["metric"] for row in content["results"]} == set(METRICS)
    assert content["settings"]["policies"] == ["full", "naive"]
    assert "recomputed_fraction" in result.stdout
    assert "perplexity" not in result.stdout
    assert "rouge_l" not in result.stdout
    assert (tmp_path / "q.png").read_bytes().startswith(b"\x89PNG")


def test_prose_has_a_loss_and_a_perplexity(subject, settings, tmp_path):
    path = tmp_path / "prose.jsonl"
    records = [
        {"passages": [f"One {i}, ", "two, "], "continuation": f"three and {i}."} for i in range(4)
    ]
    path.write_text(
        "".join(json.dumps(record) + "\n" for record in [*records, {"passages": ["One"]}])
    )
    options = QualityOptions(
        (str(path),), ("full", "naive"), limit=3, resume=tmp_path / "run.jsonl"
    )
    measured = run_quality(subject, settings, options)
    full, naive = measured.report.rows
    assert set(naive) == FIELDS - {"answer_agreement", "answer_kl"} | {"perplexity"}
    assert (naive["metric"], naive["main"], naive["n"]) == ("loss", True, 3)
    assert naive["perplexity"] == pytest.approx(math.exp(naive["score"]))
    assert naive["vs_full"] == pytest.approx(naive["score"] - full["score"])
    assert naive["kl"] > 0 == full["kl"]
    assert run_quality(subject, settings, options).report.rows == [full, naive]
    plot_quality(main_rows([full, naive]), tmp_path / "q.png")
    skipped = run_quality(subject, settings, replace(options, limit=None, resume=None)).skipped
    assert [skip.reason for skip in skipped] == ["'continuation' is missing"]


def test_the_command_says_what_it_skipped(data):
    arguments = [
        "--shape",
        "tiny",
        "--policies",
        "naive",
        "--max-model-len",
        "300",
        "--max-tokens",
        "1",
    ]
    result = CliRunner().invoke(app, ["bench", "quality", "--dataset", data, *arguments])
    assert result.exit_code == 0, result.output
    assert "skipped record 5: 'passages' is empty" in result.stderr
    assert "skipped toys 6: over the window" in result.stderr


BAD_ARGUMENTS = [
    (["--dataset", "nothing.jsonl"], "ship with kvlinker are reader"),
    (["--policies", "blend"], "Unknown policy"),
    (["--json", "no/such/folder/q.json"], "no/such/folder"),
    (["--split", "sentence"], "Invalid value for '--split'"),
    (["--limit", "0"], "Invalid value for '--limit'"),
    (["--generation-context", "nowhere"], "generation-context"),
]


def test_bad_arguments_end_with_a_clear_message(subtests):
    for arguments, message in BAD_ARGUMENTS:
        with subtests.test(arguments=arguments):
            result = CliRunner().invoke(app, ["bench", "quality", "--shape", "tiny", *arguments])
            assert result.exit_code == 2
            assert message in result.stderr


def test_formats_of_weights_are_compared_with_full_of_the_first(subject, settings, data):
    others = {
        form: replace(subject, loaded=loaded_model("llama", weights=form))
        for form in ("auto", "int4")
    }
    options = QualityOptions((data,), ("full", "naive"), max_tokens=4)
    measured = run_quality(subject, settings, options, others)
    rows = {
        row["policy"]: row for row in measured.report.rows if row["task"] == "all" and row["main"]
    }
    assert list(rows) == ["full", "naive", "full@auto", "naive@auto", "full@int4", "naive@int4"]
    assert rows["full@auto"]["kl"] == rows["full"]["kl"] == 0
    assert rows["naive@auto"]["kl"] == rows["naive"]["kl"]
    assert rows["full@int4"]["kl"] > 0
    alone = run_quality(others["int4"], settings, options).report.rows
    for metric in ("f1", "rouge_l"):  # others compare with the full prefill
        scores = [
            [row["score"] for row in found if row["policy"] == policy and row["metric"] == metric]
            for found, policy in ((alone, "full"), (measured.report.rows, "full@int4"))
        ]
        assert scores[0] == scores[1]
