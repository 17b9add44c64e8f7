"""Questions to metrics as the page answers them; tests/observability/test_watched_job.py asks Prometheus."""

from collections.abc import Mapping

import pytest

from psfleet.core.base.panels.panel import (
    Age,
    Expression,
    Level,
    Look,
    Mean,
    Quantile,
    Rate,
    Ratio,
    Series,
    Skew,
)
from psfleet.core.base.panels.process_panels import PANELS


def look(at: float, **counts: list[tuple[str, str, float]]) -> Look:
    """Samples with the labels rank and le."""
    return Look(
        at,
        {
            name: [({"rank": rank, "le": le}, value) for rank, le, value in samples]
            for name, samples in counts.items()
        },
    )


BEFORE = look(
    100,
    a_total=[("0", "", 10), ("1", "", 50), ("2", "", 7)],
    h_bucket=[("0", "1", 0), ("0", "2", 0), ("0", "4", 0), ("0", "+Inf", 0)],
    h_sum=[("0", "", 0)],
    h_count=[("0", "", 0)],
)
NOW = look(
    110,
    a_total=[("0", "", 30), ("1", "", 20), ("3", "", 99)],
    b=[("0", "", 0), ("1", "", 4)],
    h_bucket=[("0", "1", 50), ("0", "2", 90), ("0", "4", 98), ("0", "+Inf", 100)],
    h_sum=[("0", "", 150)],
    h_count=[("0", "", 100)],
    t=[("0", "", 90), ("1", "", 95)],
)
RANK = ("rank",)


@pytest.mark.parametrize(
    ("question", "reply"),
    [
        (Level("a_total"), {(): 149}),
        (Level("a_total", RANK, {"rank": "1"}), {("1",): 20}),
        (Level("a_total", aggregate="max"), {(): 99}),
        (Level("nothing"), {}),
        # Rank 1 was set back to 0 between the looks, rank 2 is gone, rank 3 has no past.
        (Rate("a_total", RANK), {("0",): 2, ("1",): 2}),
        (Ratio(Level("a_total", RANK), Level("b", RANK)), {("1",): 5}),
        (Mean("h", RANK), {("0",): 1.5}),
        (Age("t"), {(): 15}),
        (Skew(Rate("a_total", RANK)), {(): 1}),
        (Quantile(0.5, "h", RANK), {("0",): 1}),
        (Quantile(0.7, "h", RANK), {("0",): 1.5}),
        (Quantile(0.99, "h", RANK), {("0",): 4}),  # beyond the last bound: that bound
    ],
)
def test_replies(question: Expression, reply: Series) -> None:
    """Each question is answered as Prometheus answers it."""
    assert question.evaluate(NOW, BEFORE) == pytest.approx(reply)


def test_two_looks_at_one_moment_tell_no_rate() -> None:
    """Neither infinity nor an error."""
    assert Rate("a_total").evaluate(NOW, NOW) == {}
    assert Quantile(0.5, "h").evaluate(NOW, NOW) == {}


def process(at: float, seconds: float, **counts: float) -> Look:
    """A look at a worker, whose counts are those of its last heartbeat."""
    labels = {"role": "worker", "rank": "0"}
    samples: dict[str, list[tuple[Mapping[str, str], float]]] = {
        name: [(labels, value)] for name, value in counts.items()
    }
    return Look(at, samples, {("worker", "0"): seconds})


def test_rates_are_those_of_the_heartbeats() -> None:
    """A count that has grown in 3 s is divided by these, when the looks are 2 s apart; a heartbeat that is
    late leaves the last rate, for some seconds."""
    rate = Rate("a_total", ("role", "rank"))
    first, second = process(100, 98, a_total=10), process(102, 101, a_total=40)
    assert rate.evaluate(second, second.before(first, first)) == {("worker", "0"): 10}
    late = process(104, 101, a_total=40)
    assert rate.evaluate(late, late.before(second, first)) == {("worker", "0"): 10}
    others = {("worker", "0"): 101.0, ("server", "0"): 107.0}
    over = Look(108, late.samples, others)
    assert rate.evaluate(over, over.before(late, first)) == {}


def test_shares_stay_within_the_whole() -> None:
    """A wait of 5 s that ends within a look of 2 s is a share of the counted time, not of the look."""
    [panel] = [one for one in PANELS if one.title == "Time in pulls"]
    names = ("psfleet_worker_pull_seconds_total", "psfleet_worker_seconds_total")
    first = process(100, 100, **dict(zip(names, (1.0, 2.0), strict=True)))
    second = process(102, 102, **dict(zip(names, (6.0, 8.0), strict=True)))
    assert panel.query.evaluate(second, first) == {("worker", "0"): pytest.approx(5 / 6)}
