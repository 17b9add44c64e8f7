"""Panels about training: its speed, slow workers, stale gradients, and NaN or infinite values.

Each Panel has a query, its meaning and advice; panels.py explains the classes.
"""

from psfleet.core.base.observability.panels import (
    Alert,
    Level,
    Mean,
    Panel,
    Quantile,
    Rate,
    Ratio,
    section,
)

_TABLE, _EACH = ("table",), ("role", "rank")
_FIRST = {"role": "server", "rank": "0"}  # server 0, which takes a part of every push


_PROGRESS = section(
    "Progress",
    Panel(
        "Samples per second",
        "cps",
        Rate("psfleet_samples_total", where=_FIRST),
        "Samples behind the pushes that server 0 has applied or held.",
        "If it falls, see which worker or server is slow below. It stays 0 for plain scripts, whose pushes "
        "do not tell their samples.",
    ),
    Panel(
        "Steps",
        "short",
        Level("psfleet_progress_steps", aggregate="max"),
        "Closed rounds in sync mode, else the pushes of the fastest worker.",
        "If it stands still, look for waiting calls and dead processes.",
    ),
    Panel(
        "Steps per second",
        "cps",
        Rate("psfleet_step_seconds_count", _EACH),
        "Pushes of each worker per second.",
        "In sync mode all have the speed of the slowest; the panels below say which one that is.",
    ),
    Panel(
        "Samples",
        "short",
        Level("psfleet_samples_total", where=_FIRST),
        "Samples behind the pushes so far.",
        "It stays 0 for plain scripts, whose pushes do not tell their samples.",
    ),
    Panel(
        "Time left",
        "s",
        Ratio(
            Level("psfleet_samples_left", where=_FIRST), Rate("psfleet_samples_total", where=_FIRST)
        ),
        "Time until the samples of fleet.dataset are used up at the present speed.",
        "It is not known of loops over other data, nor of a dataset without an end.",
    ),
    Panel(
        "Loss",
        "none",
        Level("psfleet_loss", _EACH),
        "Loss of each worker's last step.",
        "If it grows, lower the learning rate; if one worker's differs, look at its data.",
    ),
    Panel(
        "Logged values",
        "none",
        Level("psfleet_logged", ("name", "role", "rank")),
        "What scripts have given to fleet.log. The page has a chart for each name.",
        "`--tensorboard` keeps every value.",
    ),
    Panel(
        "Lag of Kafka partitions",
        "short",
        Level("psfleet_topic_lag", ("partition",), aggregate="max"),
        "Messages of a partition behind those that a worker has read, of the worker that is furthest behind.",
        "If all grow, add workers. If one stays 0 and the others grow, that partition has less traffic and "
        "the order waits for it: give KafkaTopic an idle time.",
    ),
)
_STALENESS = section(
    "Staleness",
    Panel(
        "Staleness, mean",
        "short",
        Mean("psfleet_staleness_pushes", ("mode",)),
        "Pushes of other workers that were applied between the pull and the push of a step.",
        "If the loss suffers, use ssp or sync mode, or fewer workers.",
    ),
    Panel(
        "Staleness, 99th percentile",
        "short",
        Quantile(0.99, "psfleet_staleness_pushes", ("mode",)),
        "Staleness that 99 % of the pushes do not exceed.",
        "One slow worker raises it: see its step time.",
    ),
    Panel(
        "Lead in ssp mode",
        "short",
        Level("psfleet_ssp_lead_steps", aggregate="max"),
        "How far a worker was ahead of the slowest at most.",
        "If it stays at --staleness, fast workers wait for a slow one.",
    ),
    Panel(
        "Pulls that wait",
        "cps",
        Rate("psfleet_waited_seconds_count", ("mode",)),
        "Pulls that a server did not answer at once, because they waited for other workers.",
        "In sync mode all wait for their round; in ssp mode raise --staleness or find the slow worker.",
    ),
    Panel(
        "Time that pulls wait, 99th percentile",
        "s",
        Quantile(0.99, "psfleet_waited_seconds", ("mode",)),
        "Time that 99 % of the pulls that wait do not exceed.",
        "One slow worker raises it: see its step time.",
    ),
)
_NUMBERS = section(
    "Numbers",
    Panel(
        "Steps with NaN or infinity",
        "short",
        Level("psfleet_nonfinite_pushes_total", _EACH),
        "Steps of a worker with a loss or gradient that is not finite. The screen, the page and the report "
        "name the first one of all workers with its step, table and id.",
        "Look at that sample; lower the learning rate, clip, or use --on-nan skip.",
        Alert("PsfleetNonFinite", "> 0", "0m", "critical"),
    ),
    Panel(
        "Gradient norm, median",
        "none",
        Quantile(0.5, "psfleet_gradient_norm", _TABLE),
        "Norm of a table's gradient in a step of any worker; powers of two are counted.",
        "If it falls to 0 a table no longer learns; if it grows, lower the learning rate.",
    ),
    Panel(
        "Gradient norm, 99th percentile",
        "none",
        Quantile(0.99, "psfleet_gradient_norm", _TABLE),
        "Norm that 99 % of the steps do not exceed.",
        "If it is far above the median, clip gradients.",
    ),
)


def _share(name: str) -> Ratio:
    """Return a query for the share of the workers' time that they spend on one activity.

    A wait is counted when it ends. So a wait that is longer than the time between two readings shows as more
    than 100 %.
    """
    part = Rate(f"psfleet_worker_{name}_seconds_total", _EACH)
    return Ratio(part, Rate("psfleet_worker_seconds_total", _EACH))


_SPEED = section(
    "Slow processes",
    Panel(
        "Step time by worker",
        "s",
        Mean("psfleet_step_seconds", _EACH),
        "Mean time from a worker's push to its next.",
        "In sync mode all wait for the slowest. The panels that follow say what it spends its time on.",
    ),
    Panel(
        "Time in pulls",
        "percentunit",
        _share("pull"),
        "Share of its steps' time that a worker spends until pulled values are there. In sync mode this "
        "contains waiting for other workers.",
        "Read ahead (psfleet.torch.prefetch), use more servers, or larger batches.",
    ),
    Panel(
        "Time in pushes",
        "percentunit",
        _share("push"),
        "Share of its steps' time that a worker spends to sum gradients and hand them over.",
        "Merge steps (gradient_merge) or compress what travels (--wire).",
    ),
    Panel(
        "Time waiting",
        "percentunit",
        _share("wait"),
        "Share of its steps' time that a worker waits for acknowledgements, at barriers and in reductions.",
        "Servers are too slow, or other workers arrive late at barriers.",
    ),
    Panel(
        "Time computing",
        "percentunit",
        _share("script"),
        "Share of its steps' time that a worker spends in the script itself: forward, backward, its data.",
        "Near 100 %, servers are no bottleneck: use more workers, or a faster model.",
    ),
    Panel(
        "Time waiting for data",
        "percentunit",
        _share("data"),
        "Share of its steps' time that a worker waits for batches of fleet.shard or fleet.dataset.",
        "Load data in other processes or prepare it before the training.",
    ),
    Panel(
        "Pushes per second by server",
        "cps",
        Rate("psfleet_pushes_total", _EACH, {"role": "server"}),
        "Pushes that a server has applied or held.",
        "All servers should have the same; one that lags holds up all workers. At 0 look for waiting calls "
        "and dead processes.",
        Alert("PsfleetNoProgress", "== 0", "5m", "critical"),
    ),
    Panel(
        "Time of a push, median",
        "s",
        Quantile(0.5, "psfleet_push_seconds", _EACH),
        "Time from the arrival of a push at a server to its answer, or until the pull that travels with it "
        "may begin.",
        "If one server's is longer, look at its CPU and its log.",
    ),
    Panel(
        "Time of a push, 99th percentile",
        "s",
        Quantile(0.99, "psfleet_push_seconds", _EACH),
        "Time that 99 % of the pushes do not exceed.",
        "If it is far above the median, look at the log's syncs and at takeovers.",
    ),
    Panel(
        "Pulls per second by server",
        "cps",
        Rate("psfleet_pull_seconds_count", _EACH),
        "Pulls that a server has answered, without those that came with a push.",
        "All servers should have the same.",
    ),
    Panel(
        "Time of a pull, median",
        "s",
        Quantile(0.5, "psfleet_pull_seconds", _EACH),
        "Time from the arrival of a pull to its values.",
        "If one server's is longer, look at its CPU and at hot ids.",
    ),
    Panel(
        "Time of a pull, 99th percentile",
        "s",
        Quantile(0.99, "psfleet_pull_seconds", _EACH),
        "Time from the arrival of a pull to its values; in sync and ssp mode with waiting for workers.",
        "If it is long in async mode, the server has too little CPU or too many rows per pull.",
    ),
    Panel(
        "Time of an exchange, 99th percentile",
        "s",
        Quantile(0.99, "psfleet_exchange_seconds", _EACH),
        "Likewise for a push that travels with the next pull, as in every mode but sync.",
        "As above.",
    ),
    Panel(
        "Waiting calls",
        "percentunit",
        Ratio(Level("psfleet_waiting_calls", _EACH), Level("psfleet_waiting_calls_limit", _EACH)),
        "Calls that wait at a server for other workers, as a share of how many may.",
        "Raise waiting_calls in PSFLEET_LIMITS, or find the worker for which all wait.",
        Alert("PsfleetCallsNearLimit", "> 0.9"),
    ),
    Panel(
        "CPU cores in use",
        "short",
        Rate("psfleet_cpu_seconds_total", _EACH),
        "CPU time of each process per second.",
        "A server near 1 is at its limit for one table; use more servers.",
    ),
)
TRAINING: tuple[Panel, ...] = (*_PROGRESS, *_SPEED, *_STALENESS, *_NUMBERS)
