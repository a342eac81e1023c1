"""What is captured of a pass lies in the host's memory, once the copies there are made."""

from collections.abc import Callable

import pytest
import torch

from kvlinker.base.errors import KVLinkerError
from kvlinker.engines.embedded.execution import capturing
from kvlinker.engines.embedded.execution.capturing import AnswerCapture, RecordingRoom
from kvlinker.store.chunk_kv import LayerKV
from tests.engines.embedded.conftest import linked_prompt

PROMPT = linked_prompt(40, 90, middle=3)


@pytest.fixture
def late_copies(monkeypatch):
    """Copies to the host that are made only when somebody waits for all of them."""
    pending: list[Callable[[], object]] = []

    def room(shape, dtype, device):
        return torch.full(tuple(shape), float("nan"), dtype=dtype)

    def copy(target, source):
        # a pass's tensors are not written to again by what follows it on their stream
        kept = source.clone()
        pending.append(lambda: target.copy_(kept))

    @torch.inference_mode()  # as passes are
    def finish(device):
        while pending:
            pending.pop(0)()

    monkeypatch.setattr(capturing, "host_room", room)
    monkeypatch.setattr(capturing, "copy_to_host", copy)
    monkeypatch.setattr(capturing, "finish_copies", finish)
    return pending


def outcome(made):
    made.cache(PROMPT)  # 64 tokens a step: the second chunk takes two
    return made.answer(PROMPT, "naive", max_tokens=2)


def answer(made):
    return outcome(made).logprobs


def test_chunks_are_whole_once_their_copies_are_made(bench, late_copies):
    ours = answer(bench())
    assert not late_copies
    assert len(ours) == 2
    assert torch.isfinite(torch.tensor(ours)).all()


def test_chunks_are_wrong_where_nobody_waits(bench, late_copies, monkeypatch):
    """So that the test before would find a wait that is missing."""
    monkeypatch.setattr(capturing, "finish_copies", lambda device: None)
    with pytest.raises(KVLinkerError, match="not all finite: layer 0"):
        outcome(bench())


def test_late_copies_change_no_answer(bench, request):
    expected = answer(bench())
    request.getfixturevalue("late_copies")
    assert answer(bench()) == expected


def test_kept_answers_lie_in_the_hosts_memory():
    capture = AnswerCapture(1, 10, RecordingRoom(1 << 20))
    parts = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    capture.record(0, 10, LayerKV(*parts))
    (layer,) = capture.part(1, 3).layers
    assert layer.key.device == torch.device("cpu")
    assert torch.equal(layer.value, parts[1][:, 1:])
