"""Panels about training: its speed, slow workers, stale gradients, and NaN or infinite values.

Each Panel has a query, its meaning and advice; panel.py explains the classes.
"""

from psfleet.core.base.panels.panel import Alert, Level, Mean, Panel, Quantile, Rate, Ratio, section

_TABLE, _EACH = ("table",), ("role", "rank")
_FIRST = {"role": "server", "rank": "0"}  # server 0, which takes a part of every push


_PROGRESS = section(
    "Progress",
    Panel(
        "Samples per second",
        "cps",
        Rate("psfleet_samples_total", where=_FIRST),
        "Training samples per second, counted by server 0 from the pushes that have arrived.",
        "If it falls, the panels below show which worker or server is slow. It stays 0 for scripts that do "
        "not report the number of samples of their pushes.",
    ),
    Panel(
        "Steps",
        "short",
        Level("psfleet_progress_steps", aggregate="max"),
        "Completed rounds in sync mode; in other modes the pushes of the fastest worker.",
        "If it stands still, look for waiting calls and dead processes.",
    ),
    Panel(
        "Steps per second",
        "cps",
        Rate("psfleet_step_seconds_count", _EACH),
        "Pushes of each worker per second.",
        "In sync mode all workers have the speed of the slowest one, which the panels below show.",
    ),
    Panel(
        "Samples",
        "short",
        Level("psfleet_samples_total", where=_FIRST),
        "Training samples so far.",
        "It stays 0 for scripts that do not report the number of samples of their pushes.",
    ),
    Panel(
        "Time left",
        "s",
        Ratio(
            Level("psfleet_samples_left", where=_FIRST), Rate("psfleet_samples_total", where=_FIRST)
        ),
        "Time until the samples of fleet.dataset are used up at the present speed.",
        "It is not known for other loops, or for a dataset without an end.",
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
        "Values that scripts reported with fleet.log. The page has a chart for each name.",
        "`--tensorboard` keeps every value.",
    ),
    Panel(
        "Lag of Kafka partitions",
        "short",
        Level("psfleet_topic_lag", ("partition",), aggregate="max"),
        "Messages of a partition that are not read yet, by the worker that is furthest behind.",
        "If the lag of all partitions grows, add workers. If one stays at 0 and the others grow, that "
        "partition has less traffic and the others wait for it: give KafkaTopic an idle time.",
    ),
)
_STALENESS = section(
    "Staleness",
    Panel(
        "Staleness, mean",
        "short",
        Mean("psfleet_staleness_pushes", ("mode",)),
        "Pushes of other workers that were applied between the pull and the push of a step.",
        "If the loss gets worse because of it, use ssp or sync mode, or fewer workers.",
    ),
    Panel(
        "Staleness, 99th percentile",
        "short",
        Quantile(0.99, "psfleet_staleness_pushes", ("mode",)),
        "99 % of the pushes have no larger staleness.",
        "One slow worker raises it: see its step time.",
    ),
    Panel(
        "Lead in ssp mode",
        "short",
        Level("psfleet_ssp_lead_steps", aggregate="max"),
        "Largest number of steps by which a worker was ahead of the slowest one.",
        "If it stays at --staleness, fast workers wait for a slow one.",
    ),
    Panel(
        "Pulls that wait",
        "cps",
        Rate("psfleet_waited_seconds_count", ("mode",)),
        "Pulls that a server did not answer at once, because they waited for other workers.",
        "In sync mode every pull waits for its round. In ssp mode raise --staleness or find the slow worker.",
    ),
    Panel(
        "Time that pulls wait, 99th percentile",
        "s",
        Quantile(0.99, "psfleet_waited_seconds", ("mode",)),
        "99 % of the waiting pulls wait no longer than this.",
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
        "name the first such step of the job, with its worker, table and id.",
        "Look at that sample; lower the learning rate, clip, or use --on-nan skip.",
        Alert("PsfleetNonFinite", "> 0", "0m", "critical"),
    ),
    Panel(
        "Gradient norm, median",
        "none",
        Quantile(0.5, "psfleet_gradient_norm", _TABLE),
        "Norm of a table's gradient in one step, over all workers. Norms are rounded to powers of two.",
        "If it falls to 0, the table no longer learns. If it grows, lower the learning rate.",
    ),
    Panel(
        "Gradient norm, 99th percentile",
        "none",
        Quantile(0.99, "psfleet_gradient_norm", _TABLE),
        "99 % of the steps have no larger norm.",
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
        "In sync mode all workers wait for the slowest one. The next panels show how each spends its time.",
    ),
    Panel(
        "Time in pulls",
        "percentunit",
        _share("pull"),
        "Share of a worker's time in which it waits for pulled values. In sync mode this includes waiting "
        "for other workers.",
        "If it is high, prefetch (psfleet.torch.prefetch), or use more servers or larger batches.",
    ),
    Panel(
        "Time in pushes",
        "percentunit",
        _share("push"),
        "Share of a worker's time in which it sums gradients and hands them over for sending.",
        "If it is high, merge steps (gradient_merge), or compress gradients (--wire).",
    ),
    Panel(
        "Time waiting",
        "percentunit",
        _share("wait"),
        "Share of a worker's time in which it waits for acknowledgements, at barriers and in reductions.",
        "If it is high, servers are too slow, or other workers arrive late at barriers.",
    ),
    Panel(
        "Time computing",
        "percentunit",
        _share("script"),
        "Share of a worker's time that the script itself needs: forward pass, backward pass, data.",
        "Near 100 % the servers are no bottleneck: use more workers or a faster model.",
    ),
    Panel(
        "Time waiting for data",
        "percentunit",
        _share("data"),
        "Share of a worker's time in which it waits for batches of fleet.shard or fleet.dataset.",
        "If it is high, load data in other processes, or prepare it before training.",
    ),
    Panel(
        "Pushes per second by server",
        "cps",
        Rate("psfleet_pushes_total", _EACH, {"role": "server"}),
        "Pushes per second that have arrived at a server.",
        "All servers should have the same value; a slower one holds up all workers. If it is 0, look for "
        "waiting calls and dead processes.",
        Alert("PsfleetNoProgress", "== 0", "5m", "critical"),
    ),
    Panel(
        "Time of a push, median",
        "s",
        Quantile(0.5, "psfleet_push_seconds", _EACH),
        "Time from the arrival of a push at a server to its answer, or until the pull that travels with it "
        "may begin.",
        "If it is longer on one server, look at that server's CPU and log.",
    ),
    Panel(
        "Time of a push, 99th percentile",
        "s",
        Quantile(0.99, "psfleet_push_seconds", _EACH),
        "99 % of the pushes take no longer than this.",
        "If it is far above the median, look at the panels about syncs to disk and takeovers.",
    ),
    Panel(
        "Pulls per second by server",
        "cps",
        Rate("psfleet_pull_seconds_count", _EACH),
        "Pulls per second that a server has answered, except those that came with a push.",
        "All servers should have the same value.",
    ),
    Panel(
        "Time of a pull, median",
        "s",
        Quantile(0.5, "psfleet_pull_seconds", _EACH),
        "Time from the arrival of a pull until its values are ready.",
        "If it is longer on one server, look at that server's CPU, and at ids that occur very often.",
    ),
    Panel(
        "Time of a pull, 99th percentile",
        "s",
        Quantile(0.99, "psfleet_pull_seconds", _EACH),
        "99 % of the pulls take no longer than this. In sync and ssp mode this includes waiting for workers.",
        "If it is long in async mode, the server has too little CPU or too many rows per pull.",
    ),
    Panel(
        "Time of an exchange, 99th percentile",
        "s",
        Quantile(0.99, "psfleet_exchange_seconds", _EACH),
        "99 % of the pushes that travel together with the next pull, as in every mode but sync, take no "
        "longer than this, including the pull.",
        "If it is long, see the panels about the time of a push and of a pull.",
    ),
    Panel(
        "Waiting calls",
        "percentunit",
        Ratio(Level("psfleet_waiting_calls", _EACH), Level("psfleet_waiting_calls_limit", _EACH)),
        "Calls that wait at a server for other workers, as a share of the number allowed.",
        "If it is high, find the worker for which the others wait, or raise waiting_calls in PSFLEET_LIMITS.",
        Alert("PsfleetCallsNearLimit", "> 0.9"),
    ),
    Panel(
        "CPU cores in use",
        "short",
        Rate("psfleet_cpu_seconds_total", _EACH),
        "CPU time of each process per second.",
        "A server works on one table with about one core. If it is near 1, use more servers.",
    ),
)
TRAINING: tuple[Panel, ...] = (*_PROGRESS, *_SPEED, *_STALENESS, *_NUMBERS)
