"""The proxy gives all connections together the bandwidth that it is told, and every byte."""

import threading
import time

import pytest
import redis

from kvlinker.base.errors import InvalidRequestError
from kvlinker_lab.store.throttling_proxy import throttling_proxy

VALUE = bytes(range(256)) * 4096
"""One MiB."""

HUNDREDS_OF_SECONDS = 500
"""What the value takes where a limit holds that should not."""


@pytest.fixture
def proxy(redis_server):
    redis_server.client.set("value", VALUE)
    with throttling_proxy(redis_server.url) as running:
        yield running


@pytest.fixture
def url(proxy, redis_server):
    return proxy.url(redis_server.url)


def seconds_of(action):
    begin = time.monotonic()
    action()
    return time.monotonic() - begin


def test_without_a_limit_all_bytes_pass(url):
    client = redis.Redis.from_url(url)
    assert client.get("value") == VALUE
    client.set("another", VALUE)
    assert client.get("another") == VALUE


def test_what_the_server_sends_takes_its_time_and_what_the_client_sends_does_not(proxy, url):
    client = redis.Redis.from_url(url)
    client.ping()
    proxy.bandwidth = 4 * len(VALUE)
    assert seconds_of(lambda: client.get("value")) > 0.2
    proxy.bandwidth = len(VALUE) / HUNDREDS_OF_SECONDS
    assert seconds_of(lambda: client.set("value", VALUE)) < HUNDREDS_OF_SECONDS / 10


def test_connections_share_the_bandwidth(proxy, url):
    proxy.bandwidth = 8 * len(VALUE)
    clients = [redis.Redis.from_url(url) for _ in range(4)]
    threads = [threading.Thread(target=client.get, args=("value",)) for client in clients]

    def together():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert seconds_of(together) > 0.45


def test_another_limit_holds_at_once(proxy, url):
    client = redis.Redis.from_url(url)
    proxy.bandwidth = 4 * len(VALUE)
    client.get("value")
    proxy.bandwidth = len(VALUE) / HUNDREDS_OF_SECONDS
    proxy.bandwidth = float("inf")
    assert seconds_of(lambda: client.get("value")) < HUNDREDS_OF_SECONDS / 10


def test_closing_ends_connections(redis_server):
    with throttling_proxy(redis_server.url) as running:
        client = redis.Redis.from_url(running.url(redis_server.url), socket_timeout=5)
        client.ping()
    with pytest.raises(redis.exceptions.ConnectionError):
        client.ping()


def test_users_and_databases_stay_in_the_url(proxy):
    assert (
        proxy.url("redis://me:secret@far:7000/3?x=1")
        == f"redis://me:secret@127.0.0.1:{proxy.port}/3?x=1"
    )


@pytest.mark.parametrize("url", ["rediss://far:6379/0", "unix:///run/redis.sock"])
def test_urls_that_no_proxy_can_stand_before_are_refused(url):
    with pytest.raises(InvalidRequestError, match="begins with redis://"), throttling_proxy(url):
        pass
