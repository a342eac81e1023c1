"""A server whose model is being loaded answers probes, and tells all others when to come again."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from threading import Event

import httpx
import pytest

from kvlinker import Client
from kvlinker.base.errors import KVLinkerError, ModelLoadingError
from kvlinker.base.loading import Loading
from kvlinker.doors.http.edge.address import AddressError, bind, listen, url_of
from kvlinker.doors.http.edge.loading import MOST_SECONDS, answering_while_loading
from tests.waiting import PATIENCE


def test_a_server_that_loads() -> None:
    loading = Loading("a-model")
    with closing(bind("127.0.0.1", 0)) as listener:
        listen(listener)
        with (
            answering_while_loading(listener, loading, request_timeout=PATIENCE),
            httpx.Client(base_url=url_of(listener), timeout=PATIENCE) as client,
        ):
            assert client.get("/live").json() == {"status": "alive"}
            for probe in ("/health", "/ping"):
                answer = client.get(probe)
                assert (answer.status_code, answer.json()) == (503, {"status": "loading"})
            loading.report("checking", 0.5)
            refused = client.post("/v1/chat/completions", json={"messages": []})
            assert refused.status_code == 503
            assert int(refused.headers["Retry-After"]) >= 1
            assert refused.headers["x-kvlinker-refused"]
            error = refused.json()["error"]
            assert error["code"] == "model_loading"
            assert error["message"].startswith("Loading a-model: checking, 60%, about ")
            message = client.post("/v1/messages", json={}).json()
            assert (message["type"], message["error"]["type"]) == ("error", "overloaded_error")


def test_clients_are_told_to_come_again_soon() -> None:
    """However long the rest is thought to take."""
    loading = Loading("a-model")
    loading.report("checking", 0.5)
    loading._began -= 1000
    assert (loading.seconds_left or 0) > MOST_SECONDS
    with closing(bind("127.0.0.1", 0)) as listener:
        listen(listener)
        with (
            answering_while_loading(listener, loading, request_timeout=PATIENCE),
            Client(url_of(listener)) as client,
            pytest.raises(ModelLoadingError, match="Loading a-model: checking, 60%") as caught,
        ):
            client.list_caches()
    assert caught.value.retry_after == MOST_SECONDS


def test_the_port_stays_open_for_the_next_server() -> None:
    """A client that connects between the two waits, and is not refused."""
    with closing(bind("127.0.0.1", 0)) as listener:
        listen(listener)
        for model in ("first", "second"):
            with answering_while_loading(listener, Loading(model), request_timeout=PATIENCE):
                text = httpx.get(f"{url_of(listener)}/v1/models", timeout=PATIENCE).text
                assert f"Loading {model}" in text


def test_what_is_accepted_is_answered() -> None:
    """However close to the end of a server a client connects."""
    handovers, clients = 8, 8
    answered, over = Event(), Event()
    with closing(bind("127.0.0.1", 0)) as listener, ThreadPoolExecutor(clients) as threads:
        listen(listener)
        host, port = listener.getsockname()

        def ask() -> None:
            while not over.is_set():
                connection = HTTPConnection(host, port, timeout=PATIENCE)
                connection.request("GET", "/health")
                assert connection.getresponse().status == 503
                connection.close()
                answered.set()

        try:
            asking = [threads.submit(ask) for _ in range(clients)]
            for _ in range(handovers):
                with answering_while_loading(listener, Loading("a"), request_timeout=PATIENCE):
                    answered.clear()
                    assert answered.wait(PATIENCE)
            over.set()
            with answering_while_loading(listener, Loading("a"), request_timeout=PATIENCE):
                for each in asking:
                    each.result()
        finally:
            over.set()


def test_loading_ends_with_the_error_of_the_load() -> None:
    with closing(bind("127.0.0.1", 0)) as listener:
        listen(listener)
        with (
            pytest.raises(KVLinkerError, match="no such model"),
            answering_while_loading(listener, Loading("a"), request_timeout=PATIENCE),
        ):
            raise KVLinkerError("no such model")


def test_a_port_that_another_process_took_meanwhile() -> None:
    """Two may bind the same address as long as none listens."""
    with closing(bind("127.0.0.1", 0)) as first:
        port = first.getsockname()[1]
        with closing(bind("127.0.0.1", port)) as second:
            listen(first)
            with pytest.raises(AddressError, match=r"already in use.*Choose another --port"):
                listen(second)


def test_nothing_is_known_of_the_rest_at_the_beginning() -> None:
    loading = Loading(str(Path("models") / "a"))
    assert str(loading) == "Loading models/a: starting, 0%"
    loading.report("reading", 0.1)
    assert loading.seconds_left is None
