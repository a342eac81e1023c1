"""The audit of the shipped model's own answers."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvlinker.doors.http.metrics import Metrics
from kvlinker.llm import LLM
from kvlinker.quality.evaluation.examiner import Examiner
from kvlinker.quality.evaluation.examples import Result
from kvlinker.service.content import parse_messages
from kvlinker.settings import load_settings

QUESTIONS = 8


def start(reader, folder, **options):
    settings = load_settings(
        state_dir=folder, disk_space=0, prefix_cache="off", kv_slots=8192, **options
    )
    return LLM.from_model(reader, settings)


@pytest.mark.whole
def test_it_finds_what_bench_quality_finds_on_the_same_requests(reader, anaphora, tmp_path):
    with start(reader, tmp_path, audit="100%") as llm:
        metrics = Metrics(llm)
        llm.events.subscribe(metrics.count)
        results: list[Result] = []
        for example in anaphora[:QUESTIONS]:
            trial = Examiner(llm, max_tokens=4, one_by_one=False)._trial(example)
            full = trial.run("full")  # not again along its answer, which would be audited, too
            results.append(trial.run("naive").compare(full, example, "naive"))
        assert llm.policy_manager.auditor.wait(60)
        tally = llm.policy_manager.auditor.figures.by_policy()["naive"]
        exposed = metrics.exposition().decode()
    agreement = sum(result.agreement for result in results) / QUESTIONS
    assert 0 < agreement < 1
    assert tally.samples == QUESTIONS
    assert tally.agreement == agreement
    low, high = tally.agreement_interval
    assert low < agreement < high
    assert tally.kl == pytest.approx(sum(result.kl for result in results) / QUESTIONS, rel=0.05)
    assert tally.alike_share <= agreement
    samples = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(exposed)
        for sample in family.samples
    }
    assert samples["kvlinker:audit_samples_total", "naive"] == QUESTIONS
    assert samples["kvlinker:audit_agreeing_total", "naive"] == tally.agreeing
    assert samples["kvlinker:audit_kl_sum", "naive"] == pytest.approx(tally.kl_sum)
    assert samples["kvlinker:audit_agreement", "low", "naive"] == pytest.approx(low)


@pytest.mark.whole
def test_answers_are_the_same_with_and_without_it(reader, anaphora, tmp_path):
    answers, logprobs = {}, {}
    for share in ("0%", "100%"):
        with start(reader, tmp_path / share, audit=share, policy="legolink-4") as llm:
            ids = llm.generate_context_cache(anaphora[0].passages)
            messages = [{"role": "user", "content": [*ids, anaphora[0].question]}]
            sampled = llm.chat_completion(messages, max_tokens=8, temperature=1.0, seed=3)
            told = llm.chat_completion(messages, max_tokens=8, temperature=0, logprobs=2)
            answers[share] = (sampled.text, told.text, [token.token_id for token in told.logprobs])
            # a step that the audit shares may add the same numbers in another order
            logprobs[share] = [token.logprob for token in told.logprobs]
            assert (llm.policy_manager.auditor is None) == (share == "0%")
    assert answers["0%"] == answers["100%"]
    assert logprobs["0%"] == pytest.approx(logprobs["100%"], abs=1e-4)


@pytest.mark.whole
def test_a_bad_policy_is_caught_and_raised_within_200_requests(reader, anaphora, tmp_path):
    """``naive`` on anaphora agrees in about half of all answers; requests that name no policy leave
    it."""
    options = {
        "audit": "50%",
        "policy": "naive",
        "quality_target": "98%",
        "quality_policies": "naive,query-10",
    }
    with start(reader, tmp_path, **options) as llm:
        asked = []
        for number in range(200):
            example = anaphora[number % 25]
            ids = llm.generate_context_cache(example.passages)
            messages = [{"role": "user", "content": [*ids, example.question]}]
            asked.append(llm.read_chat(parse_messages(messages)).policy.name)
            llm.chat_completion(messages, max_tokens=4, temperature=0)
            assert llm.policy_manager.auditor.wait(30)
            if asked[-1] != "naive":
                break
        (decision,) = llm.policy_manager.controller.decisions
        named = llm.read_chat(parse_messages(messages), policy="naive")
        assert named.policy.name == "naive", "who names a policy gets it"
    assert set(asked[:-1]) == {"naive"}
    assert (decision.before, decision.after, decision.reason) == (
        "naive",
        "query-10",
        "below target",
    )
    assert decision.agreeing < 0.98 * decision.samples
