import threading

import pytest

from kvlinker.embedded.commands import CommandQueue
from kvlinker.errors import EngineClosedError


def test_commands_come_out_in_order():
    commands, ran = CommandQueue(), []
    for number in range(3):
        commands.put(lambda number=number: ran.append(number))
    assert commands.wait(lambda: False)
    while (command := commands.next()) is not None:
        command()
    assert ran == [0, 1, 2]


def test_a_busy_engine_does_not_wait():
    commands = CommandQueue()
    assert commands.wait(lambda: True)
    assert commands.next() is None


@pytest.mark.parametrize("end", ["put", "wake", "close"])
def test_whoever_waits_hears_of_it(end):
    commands, busy, answers = CommandQueue(), threading.Event(), []
    waiting = threading.Thread(target=lambda: answers.append(commands.wait(busy.is_set)))
    waiting.start()
    if end == "put":
        commands.put(lambda: None)
    elif end == "wake":
        busy.set()
        commands.wake()
    else:
        commands.close()
    waiting.join(timeout=60)
    assert answers == [end != "close"]


def test_a_closed_queue_keeps_what_it_has_and_takes_nothing():
    commands = CommandQueue()
    commands.put(lambda: None)
    commands.close()
    commands.close()
    with pytest.raises(EngineClosedError):
        commands.put(lambda: None)
    assert commands.closed
    assert not commands.wait(lambda: True)
    assert commands.next() is not None
    assert commands.next() is None
