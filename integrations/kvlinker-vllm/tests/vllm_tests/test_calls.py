"""Calls of tools on vLLM, by the tests of the embedded engine's server."""

import pytest

pytest.importorskip("vllm")

from tests.doors.http.test_calls import *  # noqa: F403
from tests.doors.http.test_client_types import (  # noqa: F401
    test_answers_and_events_are_of_the_clients_types,
    test_errors_are_of_anthropics_type,
    test_errors_are_of_openais_type,
    test_other_answers_are_of_the_clients_types,
)
from tests.doors.http.test_random_calls import (  # noqa: F401
    test_calls_hold_wherever_they_are_cut,
)
