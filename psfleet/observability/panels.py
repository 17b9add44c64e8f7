"""What operators look at, in the order in which they ask: the one table of panels.

The page of a job, the Grafana dashboard, the alert rules and docs/watch.md are made from it
(tools/generate_panels.py), and a test asks a real Prometheus every question.
"""

from dataclasses import dataclass

from psfleet.observability.expressions import (
    Age,
    Expression,
    Level,
    Mean,
    Quantile,
    Rate,
    Ratio,
    Skew,
)

__all__ = ["PANELS", "Alert", "Panel"]


@dataclass(frozen=True)
class Alert:
    """When somebody is to be told about a panel.

    Attributes:
        name: Of the alert.
        when: Condition on the panel's query, as in `> 0.9`.
        lasts: How long it must hold.
        severity: `warning` or `critical`.
    """

    name: str
    when: str
    lasts: str = "1m"
    severity: str = "warning"


@dataclass(frozen=True)
class Panel:
    """One figure.

    Attributes:
        section: Question that it helps to answer.
        unit: Of Grafana: `s`, `bytes`, `short`, `percentunit`, `cps` (per second), `Bps`.
        query: What is asked.
        meaning: What the figure is.
        advice: What to do if it is bad.
        alert: When somebody is told.
    """

    section: str
    title: str
    unit: str
    query: Expression
    meaning: str
    advice: str
    alert: Alert | None = None


_PROGRESS, _SPEED = "Does it progress?", "Who is slow?"
_STALENESS, _MEMORY = "How stale are gradients?", "Does memory suffice?"
_SKEW, _NUMBERS = "Is the load even?", "Are the numbers sound?"
_RELIABILITY, _WIRE = "Does it survive?", "What travels?"
_RANK, _TABLE, _EACH = ("rank",), ("table",), ("role", "rank")
_WORKER = {"role": "worker"}

PANELS: tuple[Panel, ...] = (
    Panel(
        _PROGRESS,
        "Samples per second",
        "cps",
        Rate("psfleet_samples_total", where={"role": "server", "rank": "0"}),
        "Samples behind the pushes that server 0 has applied or held.",
        "If it falls, see which worker or server is slow below.",
        Alert("PsfleetNoProgress", "== 0", "5m", "critical"),
    ),
    Panel(
        _PROGRESS,
        "Steps",
        "short",
        Level("psfleet_progress_steps", aggregate="max"),
        "Closed rounds in sync mode, else the pushes of the fastest worker.",
        "If it stands still, look for waiting calls and dead processes.",
    ),
    Panel(
        _PROGRESS,
        "Loss",
        "short",
        Level("psfleet_loss", _RANK),
        "Loss of each worker's last step.",
        "If it grows, lower the learning rate; if one worker's differs, look at its data.",
    ),
    Panel(
        _SPEED,
        "Step time by worker",
        "s",
        Mean("psfleet_step_seconds", _RANK),
        "Mean time from a worker's push to its next.",
        "In sync mode all wait for the slowest. The panels that follow say what it spends its time on.",
    ),
    Panel(
        _SPEED,
        "Time in pulls",
        "percentunit",
        Rate("psfleet_worker_pull_seconds_total", _RANK),
        "Share of its time that a worker spends until pulled values are there. In sync mode this contains "
        "waiting for other workers.",
        "Read ahead (psfleet.torch.prefetch), use more servers, or larger batches.",
    ),
    Panel(
        _SPEED,
        "Time in pushes",
        "percentunit",
        Rate("psfleet_worker_push_seconds_total", _RANK),
        "Share of its time that a worker spends to sum gradients and hand them over.",
        "Merge steps (gradient_merge) or compress what travels (--wire).",
    ),
    Panel(
        _SPEED,
        "Time waiting",
        "percentunit",
        Rate("psfleet_worker_wait_seconds_total", _RANK),
        "Share of its time that a worker waits for acknowledgements, at barriers and in reductions.",
        "Servers are too slow, or other workers arrive late at barriers.",
    ),
    Panel(
        _SPEED,
        "Time waiting for data",
        "percentunit",
        Rate("psfleet_worker_data_seconds_total", _RANK),
        "Share of its time that a worker waits for batches of fleet.shard or fleet.dataset.",
        "Load data in other processes or prepare it before the training.",
    ),
    Panel(
        _SPEED,
        "Pushes per second by server",
        "cps",
        Rate("psfleet_pushes_total", _RANK, {"role": "server"}),
        "Pushes that a server has applied or held.",
        "All servers should have the same; one that lags holds up all workers.",
    ),
    Panel(
        _SPEED,
        "Time of a push, median",
        "s",
        Quantile(0.5, "psfleet_push_seconds", _RANK),
        "Time from the arrival of a push at a server to its answer.",
        "If one server's is longer, look at its CPU and its log.",
    ),
    Panel(
        _SPEED,
        "Time of a pull, 99th percentile",
        "s",
        Quantile(0.99, "psfleet_pull_seconds", _RANK),
        "Time from the arrival of a pull to its values; in sync and ssp mode with waiting for workers.",
        "If it is long in async mode, the server has too little CPU or too many rows per pull.",
    ),
    Panel(
        _SPEED,
        "Time of an exchange, 99th percentile",
        "s",
        Quantile(0.99, "psfleet_exchange_seconds", _RANK),
        "Likewise for a push that travels with the next pull, as in every mode but sync.",
        "As above.",
    ),
    Panel(
        _SPEED,
        "Waiting calls",
        "percentunit",
        Ratio(Level("psfleet_waiting_calls", _RANK), Level("psfleet_waiting_calls_limit", _RANK)),
        "Calls that wait at a server for other workers, as a share of how many may.",
        "Raise parked in PSFLEET_LIMITS, or find the worker for which all wait.",
        Alert("PsfleetCallsNearLimit", "> 0.9"),
    ),
    Panel(
        _SPEED,
        "CPU cores in use",
        "short",
        Rate("psfleet_cpu_seconds_total", _EACH),
        "CPU time of each process per second.",
        "A server near 1 is at its limit for one table; use more servers.",
    ),
    Panel(
        _STALENESS,
        "Staleness, mean",
        "short",
        Mean("psfleet_staleness_pushes", ("mode",)),
        "Pushes of other workers that were applied between the pull and the push of a step.",
        "If the loss suffers, use ssp or sync mode, or fewer workers.",
    ),
    Panel(
        _STALENESS,
        "Staleness, 99th percentile",
        "short",
        Quantile(0.99, "psfleet_staleness_pushes", ("mode",)),
        "Staleness that 99 % of the pushes do not exceed.",
        "One slow worker raises it: see its step time.",
    ),
    Panel(
        _STALENESS,
        "Lead in ssp mode",
        "short",
        Level("psfleet_ssp_lead_steps", aggregate="max"),
        "How far a worker was ahead of the slowest at most.",
        "If it stays at --staleness, fast workers wait for a slow one.",
    ),
    Panel(
        _MEMORY,
        "Memory against the limit",
        "percentunit",
        Ratio(
            Level("psfleet_memory_used_bytes", _RANK), Level("psfleet_memory_limit_bytes", _RANK)
        ),
        "Memory of tables and held pushes of a server, as a share of what --server-memory leaves them.",
        "Above 1 pushes are refused: raise the limit, use more servers, or let rows go (CapacityEntry).",
        Alert("PsfleetMemoryShort", "> 0.9", severity="critical"),
    ),
    Panel(
        _MEMORY,
        "Rows",
        "short",
        Level("psfleet_table_rows", _TABLE),
        "Rows of a sparse table on all servers.",
        "If it grows without end, admit ids by count (CountFilterEntry) or let rows expire.",
    ),
    Panel(
        _MEMORY,
        "Memory of tables",
        "bytes",
        Level("psfleet_table_bytes", _TABLE),
        "Rows, optimizer state and index of a table on all servers.",
        "See rows.",
    ),
    Panel(
        _MEMORY,
        "Rows that went",
        "cps",
        Rate("psfleet_dropped_rows_total", _TABLE),
        "Rows that were evicted, shrunk or removed per second.",
        "If many go and come back, the capacity is too small.",
    ),
    Panel(
        _MEMORY,
        "Ids that wait for a row",
        "short",
        Level("psfleet_candidate_ids", _TABLE),
        "Ids that were pushed too seldom for a row so far.",
        "If no id gets a row, lower the count of the entry.",
    ),
    Panel(
        _MEMORY,
        "Resident memory",
        "bytes",
        Level("psfleet_resident_bytes", _RANK),
        "Memory of a server process as the system sees it.",
        "Compare it with the memory of the machine.",
    ),
    Panel(
        _SKEW,
        "Skew between servers",
        "short",
        Skew(Rate("psfleet_received_bytes_total", _RANK)),
        "Bytes that the busiest server gets, divided by the mean; 1 is even.",
        "Above 1.5 a few hot ids or one large dense table lie on one server.",
        # Of two servers, one that gets everything has twice the mean.
        Alert("PsfleetSkewedServers", "> 1.5", "10m"),
    ),
    Panel(
        _NUMBERS,
        "Steps with NaN or infinity",
        "short",
        Level("psfleet_nonfinite_pushes_total", _RANK),
        "Steps of a worker with a loss or gradient that is not finite. Its log names the first one with "
        "step, table and id.",
        "Look at that sample; lower the learning rate, clip, or use --on-nan skip.",
        Alert("PsfleetNonFinite", "> 0", "0m", "critical"),
    ),
    Panel(
        _NUMBERS,
        "Gradient norm",
        "short",
        Level("psfleet_gradient_norm", _TABLE, aggregate="max"),
        "Greatest norm of a table's gradient among the workers' last steps.",
        "If it jumps, clip gradients.",
    ),
    Panel(
        _RELIABILITY,
        "Processes",
        "short",
        Level("psfleet_process_up", ("role",)),
        "Servers, standbys and workers that run.",
        "See the launcher's screen and the logs of those that are missing.",
    ),
    Panel(
        _RELIABILITY,
        "Deaths",
        "short",
        Level("psfleet_deaths_total", _EACH),
        "Processes that ended with an error or by a signal.",
        "The log of the process says why; a process that dies again and again lacks memory most often.",
        Alert("PsfleetProcessDied", "> 0", "0m"),
    ),
    Panel(
        _RELIABILITY,
        "Restarts",
        "short",
        Level("psfleet_restarts_total", _EACH),
        "Processes that were started again.",
        "As above.",
    ),
    Panel(
        _RELIABILITY,
        "Takeovers",
        "short",
        Level("psfleet_takeover_seconds_count", _RANK),
        "How often a standby took the place of its server.",
        "Every takeover costs the fleet the time that the next panel shows.",
    ),
    Panel(
        _RELIABILITY,
        "Time of takeovers",
        "s",
        Level("psfleet_takeover_seconds_sum", _RANK),
        "Time from the deaths of servers until their standbys answered, in all.",
        "Lower --hung-after if servers hang rather than die.",
    ),
    Panel(
        _RELIABILITY,
        "Attempts beyond the first",
        "cps",
        Rate("psfleet_retries_total", _RANK),
        "Calls of a worker that were made again.",
        "The network or a server loses answers; see deaths.",
        Alert("PsfleetManyRetries", "> 1", "5m"),
    ),
    Panel(
        _RELIABILITY,
        "Pushes that came again",
        "short",
        Level("psfleet_duplicate_pushes_total", _RANK),
        "Pushes that a server had applied before; they changed nothing.",
        "Normal after restarts.",
    ),
    Panel(
        _RELIABILITY,
        "Torn steps",
        "short",
        Level("psfleet_torn_steps_total"),
        "Steps of dead workers that only some of the servers have.",
        "Sync mode has none; elsewhere a few do no harm.",
    ),
    Panel(
        _RELIABILITY,
        "Bytes not on the disk yet",
        "bytes",
        Level("psfleet_log_unsynced_bytes", _RANK),
        "What a server's log holds that a loss of power would take; only with log+fsync.",
        "If it stays high, the disk is too slow.",
    ),
    Panel(
        _RELIABILITY,
        "Time of a sync to disk, 99th percentile",
        "s",
        Quantile(0.99, "psfleet_log_sync_seconds", _RANK),
        "Time for the disk to keep a log; pushes wait for it with log+fsync.",
        "Use a faster disk, or --durability log.",
    ),
    Panel(
        _RELIABILITY,
        "Age of the last snapshot",
        "s",
        Age("psfleet_snapshot_timestamp_seconds"),
        "Time since the last snapshot of the whole job was complete.",
        "If it grows beyond --snapshot-every, the log of server 0 says why.",
        Alert("PsfleetSnapshotOld", "> 86400"),
    ),
    Panel(
        _RELIABILITY,
        "Size of the last snapshot",
        "bytes",
        Level("psfleet_snapshot_bytes"),
        "Bytes of the last snapshot's files.",
        "Take deltas if it is large.",
    ),
    Panel(
        _RELIABILITY,
        "Records that the standby lacks",
        "short",
        Level("psfleet_standby_lag_records", _RANK),
        "Records of a server that its standby has not taken yet; answers wait for them.",
        "The standby's machine or the network is too slow.",
        Alert("PsfleetStandbyBehind", "> 10000", "5m"),
    ),
    Panel(
        _WIRE,
        "Received by servers",
        "Bps",
        Rate("psfleet_received_bytes_total", _RANK),
        "Bytes of training calls, with those in shared memory.",
        "Compress gradients (--wire bf16 or int8), or merge steps.",
    ),
    Panel(
        _WIRE,
        "Sent by servers",
        "Bps",
        Rate("psfleet_sent_bytes_total", _RANK),
        "Bytes of pulled values.",
        "Compress weights (--wire bf16).",
    ),
    Panel(
        _WIRE,
        "Written to logs",
        "Bps",
        Rate("psfleet_log_bytes_total", _RANK),
        "Bytes of records that servers keep.",
        "A snapshot shortens the log: --snapshot-every.",
    ),
)
