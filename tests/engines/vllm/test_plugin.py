import logging

from kvlinker.engines.vllm.plugin import FailureNote


def test_the_first_error_by_which_a_process_does_not_start_is_written_down(tmp_path):
    path = tmp_path / "failure"
    logger = logging.Logger("vllm")
    logger.addHandler(FailureNote(path))
    logger.error("no exception")
    for message in ("no room for\n  KV", "a worker did not start"):
        try:
            raise ValueError(message)
        except ValueError:
            logger.exception("It failed to start.")
    assert path.read_text() == "ValueError: no room for KV"


def test_errors_after_the_start_are_nobodys(tmp_path):
    note = FailureNote(tmp_path / "gone" / "failure")
    error = (ValueError, ValueError("late"), None)
    note.emit(logging.LogRecord("vllm", logging.ERROR, "", 0, "", None, error))
    assert not list(tmp_path.iterdir())
