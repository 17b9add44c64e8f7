"""A server counts as ready once every machine can connect to it; a firewall between two is named."""

import socket

from psfleet_launch.engines.remote.job_opening import ConnectionChecks
from psfleet_launch.engines.remote.machine import why_unreachable
from psfleet_launch.job.job_plan import Member
from psfleet_launch.supervision.job_events import ServerReady, ServerUnreachable
from tests.agents.conftest import JOINED, TRAINER, TWO, Site
from tests.agents.machines import NETWORK, Lab

S0, S1 = ServerReady(Member("server", 0), "a:1"), ServerReady(Member("server", 1), "b:2")


def begun() -> ConnectionChecks:
    """Both servers of a job listen, and both machines are asked."""
    checks = ConnectionChecks()
    assert checks.begin(S0, "alpha", ["alpha", "beta"])
    assert checks.begin(S1, "beta", ["alpha", "beta"])
    return checks


def test_the_last_machine_makes_a_server_ready() -> None:
    """Each endpoint waits for its own answers, and those of others do not count."""
    checks = begun()
    assert not [*checks.answered("alpha", "a:1", ""), *checks.answered("beta", "b:2", "")]
    assert not [*checks.answered("alpha", "a:1", ""), *checks.answered("alpha", "c:3", "")]
    assert list(checks.answered("beta", "a:1", "")) == [S0]
    assert list(checks.answered("alpha", "b:2", "")) == [S1]


def test_the_first_machine_that_cannot_connect_is_named() -> None:
    """Later answers about the same server have no effect."""
    checks = begun()
    (actual,) = checks.answered("alpha", "b:2", "Connection refused")
    assert isinstance(actual, ServerUnreachable)
    assert actual.member == S1.member
    assert actual.why.startswith(
        "host alpha cannot connect to server 1 on host beta at b:2 (Connection refused); let firewalls pass"
    )
    assert not list(checks.answered("beta", "b:2", "Connection refused"))


def test_nobody_waits_for_a_machine_that_is_lost() -> None:
    """The others have answered, so the server is ready; one whose process has ended never is."""
    checks = begun()
    checks.forget(S1.member)
    assert not list(checks.answered("alpha", "a:1", ""))
    assert list(checks.lose("beta")) == [S0]
    assert not list(checks.lose("alpha"))


def test_a_server_that_starts_again_is_not_checked() -> None:
    """An interruption of the network then is no reason to end the job."""
    assert not begun().begin(ServerReady(S0.member, "a:9"), "alpha", ["alpha"])


@JOINED
def test_a_firewall_that_blocks_one_direction(site: Site, pair: Lab) -> None:
    """It drops new connections; those of the other direction pass. No worker starts."""
    site.lab = pair
    with pair.blocked("beta", "INPUT", "--source", f"{NETWORK}.2", "--jump", "DROP"):
        engine = ("--engine", "join", "--agents", "2", "--listen", f"{NETWORK}.1")
        launcher = site.start(*engine, *TWO, TRAINER, "30")
        for number, name in enumerate(pair.hosts, 1):
            site.join(launcher, name, "", *pair.within(number))
        code, _, err = site.ends(launcher)
    assert code == 1, err
    message = f"host alpha cannot connect to server 1 on host beta at {NETWORK}.3:"
    assert f"server 1 failed first: {message}" in err
    assert "no answer within 5 s" in err
    assert "host beta · rank 1" in err
    assert "then stopped: server 0, server 1 (asked to stop" in err


def test_a_port_where_nobody_listens() -> None:
    """It refuses at once."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        assert why_unreachable(f"127.0.0.1:{bound.getsockname()[1]}") == "Connection refused"
