"""A machine is out of reach only if its kernel acknowledges nothing, however quiet its processes are."""

import os
import socket
from collections.abc import Iterator

import pytest

from psfleet_launch.engines.remote.agent_hub import PeerSocket, Reachability
from tests.waiting import until

LOOK = 0.25


class Machine:
    """A machine that was heard last, and whose kernel acknowledged last, when it is said."""

    def __init__(self) -> None:
        self.at = 100.0
        self.last_message = self.acknowledged = self.at
        self.reach = Reachability()

    def look(self, seconds: float, *, step: float = LOOK, kernel: bool = False) -> list[bool]:
        """Whether it can be reached, look by look; `kernel`: its kernel acknowledges what it is sent."""
        hosts = []
        for _ in range(round(seconds / step)):
            self.at += step
            if kernel:
                self.acknowledged = self.at - 0.1
            self.reach.look(self.at, self.last_message, lambda: self.at - self.acknowledged)
            hosts.append(self.reach.can_be_reached)
        return hosts


def test_a_machine_without_power_is_noticed() -> None:
    """Half a second after its last word it is asked; one second later it is out of reach."""
    machine = Machine()
    assert all(machine.look(1.25))
    assert machine.look(0.5) == [False, False]


def test_a_stopped_process_is_no_lost_machine() -> None:
    """The agent says nothing for an hour, and its kernel acknowledges."""
    machine = Machine()
    assert all(machine.look(3600, kernel=True))


def test_a_machine_that_comes_back_can_be_reached() -> None:
    """Whether its agent speaks again or its kernel alone."""
    machine = Machine()
    machine.look(5)
    assert machine.look(LOOK, kernel=True) == [True]
    machine.look(5)
    machine.last_message = machine.at + LOOK
    assert machine.look(LOOK) == [True]


@pytest.mark.parametrize("asleep", [10.0, 3600.0])
def test_nobody_is_lost_while_the_launcher_sleeps(asleep: float) -> None:
    """However long its machine was stopped: on both sides of that sleep the others are asked first."""
    machine = Machine()
    assert all(machine.look(0.75))
    assert machine.look(asleep, step=asleep) == [True]
    assert machine.look(LOOK, kernel=True) == [True]


def test_a_machine_that_sends_is_sent_nothing() -> None:
    """Asking is for the quiet ones, and four times a second at most."""
    machine, never = Machine(), lambda: 0.0
    assert not machine.reach.look(100.4, 100.0, never)
    assert machine.reach.look(100.6, 100.0, never)
    assert not machine.reach.look(100.7, 100.0, never)
    assert machine.reach.look(100.9, 100.0, never)


@pytest.fixture(params=[socket.AF_INET, socket.AF_INET6], ids=["ipv4", "ipv6"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, socket.socket, str]]:
    """Two ends of a TCP connection, and the second one's address as gRPC names it."""
    loopback = "127.0.0.1" if request.param is socket.AF_INET else "::1"
    with socket.socket(request.param) as listening:
        listening.bind((loopback, 0))
        listening.listen()
        with socket.socket(request.param) as other:
            other.connect(listening.getsockname())
            port = other.getsockname()[1]
            named = "ipv4:127.0.0.1" if request.param is socket.AF_INET else "ipv6:%5B::1%5D"
            with listening.accept()[0] as own:
                yield own, other, f"{named}:{port}"


def test_a_kernel_acknowledges_for_a_process_that_does_not_read(
    pair: tuple[socket.socket, socket.socket, str],
) -> None:
    """Nothing that was sent waits for long, although nobody takes it."""
    own, _, peer = pair
    known = PeerSocket(peer)
    before = os.listdir("/proc/self/fd")
    own.sendall(b"probe")
    until(lambda: known.unanswered() == 0.0, "acknowledgement")
    assert known._descriptor == own.fileno()
    assert os.listdir("/proc/self/fd") == before, "the socket has a duplicate"


def test_a_connection_that_is_not_there_says_nothing() -> None:
    """What is not known is no reason to give a machine up."""
    assert PeerSocket("ipv4:192.0.2.1:9").unanswered() == 0.0
