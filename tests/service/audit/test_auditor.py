"""The auditor over an engine that scores by rule: who is drawn, what is recorded, and what becomes
of it."""

import json
import threading
from concurrent.futures import Future
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest

from kvlinker.base.errors import InvalidRequestError, KVLinkerError
from kvlinker.base.events import AnswerAudited, AuditSkipped, Events
from kvlinker.base.types.answers import Delta, PromptLogprobs, Timing, TokenLogprob, Usage
from kvlinker.base.types.chunks import Chunk
from kvlinker.base.types.grammars import AnswerGrammar
from kvlinker.base.types.sampling import SamplingParams
from kvlinker.engines.contract.contract import Engine, Failed, Finished, GenerationRequest
from kvlinker.linking import parse_policy
from kvlinker.prompting.segments import CachedSegment, FreshSegment, Prompt
from kvlinker.service.audit.auditor import HOUR, TOP, AuditOptions, Auditor, TokenBudget
from kvlinker.service.audit.comparison import RequestKind
from kvlinker.service.audit.figures import MOST_POLICIES, OTHER_POLICIES, AuditFigures
from kvlinker.service.audit.findings import Findings
from kvlinker.service.audit.journal import AuditJournal

USAGE = Usage(3, 1, 2)
PROMPT = Prompt((FreshSegment((1,)), CachedSegment(Chunk((2, 3, 4))), FreshSegment((5, 6))))
BEST, OTHER = np.log(0.75), np.log(0.25)


class ScoringEngine:
    """Finds the tokens of ``best`` the most likely ones of an answer, with 3/4, and the next number
    with 1/4."""

    def __init__(self, best):
        self.best = best
        self.scored = []
        self.may_score = threading.Event()
        self.may_score.set()

    def score_whole(self, tokens, *, first, top, tenant):
        self.may_score.wait(5)
        self.scored.append((tokens.tolist(), first, top, tenant))
        ids = np.array([[token, token + 1] for token in self.best[: len(tokens) - first]])
        logprobs = np.tile([BEST, OTHER], (len(ids), 1)).astype(np.float32)
        done: Future[PromptLogprobs] = Future()
        done.set_result(
            PromptLogprobs(tokens[first:], logprobs[:, 0], ids, logprobs, Usage(0, 0, len(tokens)))
        )
        return done


@pytest.fixture
def make():
    made: list[tuple[Auditor, ScoringEngine]] = []

    def make(best=(7, 8), share=1.0, tokens_per_hour=None, known=(), controller=None, **options):
        events = Events()
        seen: list[object] = []
        events.subscribe(seen.append)
        engine = ScoringEngine(best)
        auditor = Auditor(
            cast(Engine, engine),
            events,
            AuditOptions(share, tokens_per_hour),
            Findings(events, AuditFigures(known), controller),
            **options,
        )
        made.append((auditor, engine))
        return auditor, seen

    yield make
    for auditor, engine in made:
        engine.may_score.set()
        auditor.close()


def entry(token):
    top = (TokenLogprob(token, "", float(BEST)), TokenLogprob(token + 1, "", float(OTHER)))
    return TokenLogprob(token, f"w{token}", float(BEST), top)


def request(policy="naive", prompt=PROMPT, **sampling):
    return GenerationRequest(
        prompt, parse_policy(policy), SamplingParams(temperature=0, **sampling), "tenant"
    )


def answer(auditor, asked, tokens=(7, 8), ends=None, reason="stop", implicit=False):
    """Let the request be answered by these tokens, then one without a distribution; return what the
    caller saw."""
    told = []
    given, sink = auditor.watch(asked, lambda choice, event: told.append(event), implicit=implicit)
    for token in tokens:
        sink(
            0,
            Delta(
                f"w{token}", (token,), () if given.sampling.logprobs is None else (entry(token),)
            ),
        )
    if ends is not None:
        sink(0, Delta("", (ends,)))
    sink(0, Finished(reason, USAGE, Timing()))
    return given, told


def tally(auditor, policy="naive"):
    assert auditor.wait(5)
    return auditor.figures.by_policy()[policy]


def test_an_answer_that_the_full_computation_would_have_given_agrees(make):
    auditor, seen = make(best=(7, 8, 9))
    answer(auditor, request(), ends=9)
    found = tally(auditor)
    assert (found.samples, found.agreement, found.alike_share) == (1, 1.0, 1.0)
    assert found.kl == pytest.approx(0, abs=1e-6)
    assert auditor._engine.scored == [([1, 2, 3, 4, 5, 6, 7, 8, 9], 6, TOP, "tenant")]
    assert seen == [
        AnswerAudited(
            "naive", agrees=True, alike=True, kl=found.kl, answer_kl=found.answer_kl, tokens=9
        )
    ]


@pytest.mark.parametrize(
    ("best", "agrees", "divergence"),
    [((6, 8, 9), False, 0.0), ((7, 9, 9), True, 1.0), ((7, 8, 10), True, 2.0)],
    ids=["first token", "later", "where the answer ended"],
)
def test_the_divergence_is_where_the_most_likely_tokens_differ(make, best, agrees, divergence):
    auditor, _ = make(best=best)
    answer(auditor, request(), ends=9)
    found = tally(auditor)
    assert (found.agreement, found.alike, found.mean_divergence) == (agrees, 0, divergence)
    assert (found.answer_kl > 0.1) == (divergence < 2)
    assert (found.kl > 0.1) == (divergence == 0)


def test_the_caller_sees_what_was_asked_for(make):
    auditor, _ = make()
    given, told = answer(auditor, request())
    assert given.sampling.logprobs == TOP
    assert told == [Delta("w7", (7,)), Delta("w8", (8,)), Finished("stop", USAGE, Timing())]
    _, told = answer(auditor, request(logprobs=1))
    assert [len(event.logprobs[0].top) for event in told[:2]] == [1, 1]
    given, told = answer(auditor, request(logprobs=50))
    assert given.sampling.logprobs == 50
    assert len(told[0].logprobs[0].top) == 2


@pytest.mark.parametrize(
    "asked",
    [request(prompt=Prompt((FreshSegment((1, 2)),))), request(max_tokens=0), request("full")],
    ids=["no chunks", "no answer", "nothing linked"],
)
def test_what_is_exact_is_not_computed_again(make, asked):
    controller = Mock()
    auditor, _ = make(controller=controller)
    given, _ = answer(auditor, asked)
    assert given is asked
    assert auditor.wait(5)
    assert not auditor.figures.by_policy()
    noted = [each.args[:3] for each in controller.note.call_args_list]
    assert noted == ([("tenant", "full", True)] if asked.policy.exact else [])


@pytest.mark.parametrize(
    "end", [Finished("cancelled", USAGE, Timing()), Failed(KVLinkerError("broke"))]
)
def test_what_is_not_answered_does_not_agree(make, end):
    controller = Mock()
    auditor, _ = make(controller=controller)
    _, sink = auditor.watch(request("full"), lambda choice, event: None)
    sink(0, end)
    controller.note.assert_not_called()


def test_policies_that_callers_make_up_are_counted_together(make):
    auditor, seen = make(known=["query-5"])
    made_up = [f"query-{10 + number}" for number in range(MOST_POLICIES - 10)]
    made_up += [f"legolink-{1 + number}" for number in range(20)]
    for policy in (*made_up, "query-5"):
        answer(auditor, request(policy))
    assert auditor.wait(5)
    found = auditor.figures.by_policy()
    assert set(found) == {*made_up[:MOST_POLICIES], "query-5", OTHER_POLICIES}
    assert found[OTHER_POLICIES].samples == len(made_up) - MOST_POLICIES
    assert {event.policy for event in seen if isinstance(event, AnswerAudited)} == set(found)


def test_so_many_are_drawn_as_the_share_says(make):
    draws = iter([0.1, 0.6, 0.49, 0.5])
    auditor, _ = make(share=0.5, draw=lambda: next(draws))
    drawn = [answer(auditor, request())[0].sampling.logprobs is not None for _ in range(4)]
    assert drawn == [True, False, True, False]


def test_what_cannot_be_compared_is_counted(make):
    auditor, seen = make(tokens_per_hour=20)
    answer(auditor, request(), reason="cancelled")
    answer(auditor, request(), tokens=())
    answer(auditor, request())
    answer(auditor, request())
    answer(auditor, request())
    _, sink = auditor.watch(request(), lambda choice, event: None)
    sink(0, Failed(KVLinkerError("broke")))
    assert tally(auditor).samples == 2
    assert auditor.skipped == {"budget": 1, "cancelled": 2, "empty": 1}
    reasons = [event.reason for event in seen if isinstance(event, AuditSkipped)]
    assert sorted(reasons) == ["budget", "cancelled", "cancelled", "empty"]


def test_a_sampled_end_is_not_taken_for_the_most_likely_token(make):
    auditor, _ = make(best=(7, 8, 10))
    sampled = GenerationRequest(
        PROMPT, parse_policy("naive"), SamplingParams(temperature=1), "tenant"
    )
    answer(auditor, sampled, ends=9)
    assert tally(auditor).alike == 1


ENDS: list[tuple[dict[str, Any], int]] = [
    ({"repetition_penalty": 1.1}, 1),
    ({"presence_penalty": 0.5}, 1),
    ({"frequency_penalty": 0.5}, 1),
    ({"logit_bias": {9: 5.0}}, 1),
    ({"bad_words": ("w10",)}, 1),
    ({"min_tokens": 2}, 1),
    ({"grammar": AnswerGrammar("regex", "a+")}, 1),
    ({"temperature": 1e-6}, 0),
    ({}, 0),
]


def test_an_end_that_may_not_be_the_most_likely_token_is_not_compared(make, subtests):
    for changed, alike in ENDS:
        with subtests.test(changed=changed):
            auditor, _ = make(best=(7, 8, 10))
            sampling = SamplingParams(**{"temperature": 0, **changed})
            answer(
                auditor,
                GenerationRequest(PROMPT, parse_policy("naive"), sampling, "tenant"),
                ends=9,
            )
            assert tally(auditor).alike == alike


def test_an_answer_counts_although_its_line_cannot_be_written(make, tmp_path, caplog):
    path = tmp_path / "audit.jsonl"
    auditor, _ = make(journal=AuditJournal(path, model="toy"))
    path.unlink()
    path.mkdir()
    answer(auditor, request())
    assert tally(auditor).samples == 1
    assert auditor.skipped == {}
    assert "missing in audit_log" in caplog.text


def test_a_full_queue_takes_no_more(make, monkeypatch):
    monkeypatch.setattr("kvlinker.service.audit.auditor.MOST_PENDING", 2)
    auditor, _ = make()
    auditor._engine.may_score.clear()
    for _ in range(3):
        answer(auditor, request())
    assert auditor.pending == 2
    assert auditor.skipped == {"backlog": 1}
    auditor._engine.may_score.set()
    assert tally(auditor).samples == 2


def test_figures_are_kept_by_tenant_and_kind(make):
    auditor, _ = make()
    answer(auditor, request())
    answer(auditor, request("legolink-4"), implicit=True)
    assert auditor.wait(5)
    figures = auditor.figures
    assert figures.tenants() == ["tenant"]
    assert figures.by_policy("other") == {}
    assert list(figures.by_policy("tenant")) == ["legolink-4", "naive"]
    assert list(figures.by_kind()) == [
        ("legolink-4", RequestKind("1", "0-1023", True)),
        ("naive", RequestKind("1", "0-1023", False)),
    ]


def test_the_budget_fills_up_again():
    now = [0.0]
    budget = TokenBudget(100, clock=lambda: now[0])
    assert budget.take(80)
    assert not budget.take(40)
    now[0] += HOUR / 4
    assert budget.take(40)
    now[0] += 10 * HOUR
    assert not budget.take(101)
    assert budget.take(100)


@pytest.mark.parametrize("texts", [False, True])
def test_lines_have_hashes_and_figures_and_texts_if_asked_for(make, tmp_path, texts):
    path = tmp_path / "audit.jsonl"
    decode = (lambda ids: f"text of {list(ids)}") if texts else None
    auditor, _ = make(best=(7, 9), journal=AuditJournal(path, model="toy", decode=decode))
    answer(auditor, request())
    answer(auditor, request())
    assert tally(auditor).samples == 2
    first, second = map(json.loads, path.read_text().splitlines())
    assert first["prompt_sha256"] == second["prompt_sha256"]
    assert (first["model"], first["policy"], first["tenant"]) == ("toy", "naive", "tenant")
    assert (first["agrees"], first["alike"], first["divergence"]) == (True, False, 1)
    assert (first["prompt_tokens"], first["answer_tokens"], first["recomputed_tokens"]) == (6, 2, 1)
    assert path.stat().st_mode & 0o077 == 0
    if texts:
        assert (first["prompt"], first["answer"]) == (
            "text of [1, 2, 3, 4, 5, 6]",
            "text of [7, 8]",
        )
    else:
        assert "prompt" not in first


def test_a_journal_that_cannot_be_written_is_refused_at_once(tmp_path):
    with pytest.raises(InvalidRequestError, match="Cannot write") as refused:
        AuditJournal(tmp_path / "none" / "audit.jsonl", model="toy")
    assert refused.value.param == "audit_log"
