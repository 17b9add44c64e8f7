"""What follows a failed attempt at a call."""

import pytest

from psfleet.core.base.errors import (
    ConfigError,
    Gap,
    LaneLost,
    Later,
    NoRoom,
    NotReady,
    PsfleetError,
    ServerUnavailable,
)
from psfleet.core.base.settings.environment import Environment
from psfleet_worker.session.retry_policy import NextAttempt, Patience, Retries

PATIENCE = Patience(outage=10.0, room=5.0)


def after(retries: Retries, error: PsfleetError, now: float, inline: bool = True) -> NextAttempt:
    """The decision while nothing is being closed."""
    return retries.after(error, now, inline=inline, closing=False)


@pytest.mark.parametrize("limit", ["outage", "start"])
def test_an_outage_is_not_cut_off_by_the_wait_for_a_reply(limit: str) -> None:
    """Limits that contradict each other are refused; those of every kind of job do not."""
    with pytest.raises(
        ConfigError, match="60 seconds for a reply and 90 for a server that cannot be"
    ):
        Patience(**{"outage": 1.0, "start": 1.0, "reply": 60.0, limit: 90.0})
    for settings in ({}, {"replicas": 1}, {"durability": "log"}):
        patience = Patience.of(Environment(**settings))
        assert patience.reply >= max(patience.outage, patience.start)


def test_pauses_grow_until_the_outage_is_over() -> None:
    """A server that is out of reach is tried again after longer and longer pauses, then given up."""
    retries, away = Retries(60.0, 3.0, PATIENCE, 0.0), ServerUnavailable("away")
    pauses = [after(retries, away, now) for now in (0.1, 0.2, 0.3, 3.0)]
    assert [again.pause for again in pauses] == [0.01, 0.02, 0.04, 0.08]
    assert all(again.lost and not again.answered for again in pauses)
    with pytest.raises(ServerUnavailable):
        after(retries, away, 3.1)
    assert retries.away == pytest.approx(3.0)


def test_a_silent_server_has_the_time_of_a_reply() -> None:
    """One that is there and stopped is no outage. When it has ended, its outage begins."""
    retries, away = Retries(60.0, 3.0, PATIENCE, 0.0), ServerUnavailable("away")

    def again(now: float, silent: bool) -> NextAttempt:
        return retries.after(away, now, inline=True, closing=False, silent=silent)

    assert all(again(now, silent=True).lost for now in (2.0, 20.0, 50.0))
    again(51.0, silent=False)
    again(53.9, silent=False)
    again(54.5, silent=True)
    with pytest.raises(ServerUnavailable):
        again(60.0, silent=True)
    assert retries.away == pytest.approx(60.0)


def test_a_server_that_is_back_gets_time_to_be_ready() -> None:
    """It answers, so the short outage of a farewell does not hold, and pauses begin again."""
    retries = Retries(60.0, 1.0, PATIENCE, 0.0)
    for now in (0.1, 0.5, 0.9):
        after(retries, ServerUnavailable("away"), now)
    assert after(retries, NotReady("starts"), 1.0) == NextAttempt(0.01)
    assert after(retries, NotReady("starts"), 10.9) == NextAttempt(0.02)
    with pytest.raises(NotReady):
        after(retries, NotReady("starts"), 11.0)


def test_a_full_disk_does_not_use_up_the_time_of_a_call() -> None:
    """The server has answered: the deadline begins again, as long as there is patience for a full disk."""
    retries = Retries(2.0, 1.0, PATIENCE, 0.0)
    assert after(retries, NoRoom("full"), 1.9).answered
    assert retries.deadline == pytest.approx(3.9)
    assert after(retries, NoRoom("full"), 3.8).answered
    with pytest.raises(NoRoom):
        after(retries, NoRoom("full"), 6.9)
    assert retries.away == pytest.approx(5.0)


def test_a_push_that_came_too_early_is_sent_again_in_a_moment() -> None:
    """The same again, until the time of the call is over."""
    retries = Retries(2.0, 1.0, PATIENCE, 0.0)
    assert after(retries, Later("wait"), 1.9) == NextAttempt(0.002, answered=True)
    with pytest.raises(Later):
        after(retries, Later("wait"), 2.0)


def test_a_reply_ends_an_outage() -> None:
    """A server that was away, answers "later" and is away again gets the whole time of an outage again."""
    retries, away = Retries(60.0, 3.0, PATIENCE, 0.0), ServerUnavailable("away")
    after(retries, away, 0.1)
    after(retries, Later("wait"), 2.0)
    assert after(retries, away, 30.0).lost
    assert after(retries, away, 32.9).lost
    with pytest.raises(ServerUnavailable):
        after(retries, away, 33.0)


def test_tensors_go_into_the_request_once() -> None:
    """Shared memory that is lost is done without at once; an error that says so again is one."""
    retries = Retries(2.0, 1.0, PATIENCE, 0.0)
    assert after(retries, LaneLost("gone"), 0.1, inline=False) == NextAttempt()
    with pytest.raises(LaneLost):
        after(retries, LaneLost("gone"), 0.2)


def test_other_errors_end_the_call() -> None:
    """What a server refuses it refuses again."""
    with pytest.raises(Gap):
        after(Retries(2.0, 1.0, PATIENCE, 0.0), Gap("push 2 has not arrived"), 0.0)


def test_nothing_is_tried_while_the_connection_closes() -> None:
    """Whoever leaves does not wait for servers that are away."""
    retries = Retries(60.0, 10.0, PATIENCE, 0.0)
    for error in (ServerUnavailable("away"), NotReady("starts"), NoRoom("full"), Later("wait")):
        with pytest.raises(type(error)):
            retries.after(error, 0.1, inline=False, closing=True)
