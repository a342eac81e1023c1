"""Documents as marked texts."""

from lab.tests.load.test_prompts import CONVERSATION, TEXTS

from kvlinker_lab.load.prompts import write_request
from kvlinker_lab.soak.marked import MarkedDocuments


def test_documents_as_marked_texts() -> None:
    body = write_request(CONVERSATION, [], MarkedDocuments(TEXTS, "naive"), model="m")
    mark = {"type": "ephemeral"}
    assert body["messages"][1]["content"] == [
        {"type": "text", "text": "C.", "cache_control": mark},
        {"type": "text", "text": "A.", "cache_control": mark},
        {"type": "text", "text": "Which?"},
    ]
    assert body["link"] == {"policy": "naive"}
