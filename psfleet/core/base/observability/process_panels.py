"""Panels about processes: memory, load, deaths and traffic. Also has PANELS, the table of all panels.

Each Panel has a query, its meaning and advice; panels.py explains the classes. Run tools/generate_panels.py
after a change, because the Grafana dashboard, the alert rules and docs/watch.md are generated from PANELS.
"""

from psfleet.core.base.observability.panels import (
    Age,
    Alert,
    Level,
    Panel,
    Quantile,
    Rate,
    Ratio,
    Skew,
    section,
)
from psfleet.core.base.observability.training_panels import TRAINING

_TABLE, _EACH = ("table",), ("role", "rank")

_MEMORY = section(
    "Memory",
    Panel(
        "Memory against the limit",
        "percentunit",
        Ratio(
            Level("psfleet_memory_used_bytes", _EACH), Level("psfleet_memory_limit_bytes", _EACH)
        ),
        "Memory of tables and held pushes of a server, as a share of what --server-memory leaves them.",
        "Above 1 pushes are refused: raise the limit, use more servers, or let rows go (CapacityEntry).",
        Alert("PsfleetMemoryShort", "> 0.9", severity="critical"),
    ),
    Panel(
        "Rows",
        "short",
        Level("psfleet_table_rows", _TABLE),
        "Rows of a sparse table on all servers.",
        "If it grows without end, admit ids by count (CountFilterEntry) or let rows expire.",
    ),
    Panel(
        "Memory of tables",
        "bytes",
        Level("psfleet_table_bytes", _TABLE),
        "Rows, optimizer state and index of a table on all servers.",
        "See rows.",
    ),
    Panel(
        "Rows that came",
        "cps",
        Rate("psfleet_admitted_rows_total", _TABLE),
        "Rows that pushes have added per second.",
        "It falls as the training goes on; if it does not, ids do not come back: check how they are made.",
    ),
    Panel(
        "Rows that went",
        "cps",
        Rate("psfleet_dropped_rows_total", _TABLE),
        "Rows that were evicted, shrunk or removed per second.",
        "If many go and come back, the capacity is too small.",
    ),
    Panel(
        "Ids that wait for a row",
        "short",
        Level("psfleet_candidate_ids", _TABLE),
        "Ids that were pushed too seldom for a row so far.",
        "If no id gets a row, lower the count of the entry.",
    ),
    Panel(
        "Unknown ids in pulls",
        "percentunit",
        Ratio(Rate("psfleet_unknown_ids_total", _TABLE), Rate("psfleet_pulled_rows_total", _TABLE)),
        "Share of the pulled ids that have no row; they get their first values.",
        "High after the first epoch: ids are hashed otherwise than in training, or the entry admits too few.",
    ),
    Panel(
        "Rows on disk found in memory",
        "percentunit",
        Ratio(
            Rate("psfleet_disk_rows_found_total", _TABLE),
            Rate("psfleet_disk_rows_used_total", _TABLE),
        ),
        "Share of the rows that calls needed of tables on disk (--server-disk) that were in memory.",
        "If it is low and calls wait, raise --server-memory or use more servers.",
    ),
    Panel(
        "Rows read from disk",
        "cps",
        Rate("psfleet_disk_rows_read_total", _TABLE),
        "Rows that were read from disk per second; each costs a read of 4 KiB.",
        "See rows on disk found in memory.",
    ),
    Panel(
        "Rows written to disk",
        "cps",
        Rate("psfleet_disk_rows_written_total", _TABLE),
        "Rows that were written to disk per second, many at once, so that others have room in memory.",
        "See rows on disk found in memory.",
    ),
    Panel(
        "Waiting for the disk",
        "percentunit",
        Rate("psfleet_disk_wait_seconds_total", _TABLE, aggregate="avg"),
        "Share of the time in which calls waited for rows, the mean of the servers.",
        "Near 100 % the disk is the bottleneck: raise --server-memory or use more servers.",
    ),
    Panel(
        "Resident memory",
        "bytes",
        Level("psfleet_resident_bytes", _EACH),
        "Memory of a process as the system sees it.",
        "Compare it with the memory of the machine; a standby takes about what its server does.",
    ),
)
_SKEW = section(
    "Balance",
    Panel(
        "Skew between servers",
        "short",
        Skew(Rate("psfleet_received_bytes_total", _EACH)),
        "Bytes that the busiest server gets, divided by the mean; 1 is even.",
        "Above 1.5 a few hot ids or one large dense table lie on one server.",
        # The skew of two servers is at most 2: one gets everything, which is twice the mean.
        Alert("PsfleetSkewedServers", "> 1.5", "10m"),
    ),
    Panel(
        "Skew of rows",
        "short",
        Skew(Rate("psfleet_pulled_rows_total", _EACH)),
        "Rows that the busiest server reads, divided by the mean; 1 is even.",
        "As above; rows are dealt by a hash, so only small tables can be uneven.",
    ),
    Panel(
        "Share of the hottest id",
        "percentunit",
        Level("psfleet_hottest_id_share", _TABLE, aggregate="max"),
        "Share of a table's ids in the batches that are its most frequent one. Workers sample their batches "
        "while somebody looks.",
        "The worker's log names an id from 10 % on. If it stands for a missing value, leave it out.",
    ),
    Panel(
        "Share of the 100 hottest ids",
        "percentunit",
        Level("psfleet_hot_ids_share", _TABLE, aggregate="max"),
        "The same for the 100 most frequent ids.",
        "If it is high, most of a batch repeats: larger batches cost servers less per sample.",
    ),
)
_RELIABILITY = section(
    "Recovery",
    Panel(
        "Processes",
        "short",
        Level("psfleet_process_up", ("role",)),
        "Servers, standbys and workers that run.",
        "See the launcher's screen and the logs of those that are missing.",
    ),
    Panel(
        "Deaths",
        "short",
        Level("psfleet_deaths_total", _EACH),
        "Processes that ended with an error or by a signal.",
        "The log of the process says why; a process that dies again and again lacks memory most often.",
        Alert("PsfleetProcessDied", "> 0", "0m"),
    ),
    Panel(
        "Restarts",
        "short",
        Level("psfleet_restarts_total", _EACH),
        "Processes that were started again.",
        "As above.",
    ),
    Panel(
        "Takeovers",
        "short",
        Level("psfleet_takeover_seconds_count", _EACH),
        "How often a standby took the place of its server.",
        "Every takeover costs the fleet the time that the next panel shows.",
    ),
    Panel(
        "Time of takeovers",
        "s",
        Level("psfleet_takeover_seconds_sum", _EACH),
        "Time from the deaths of servers until their standbys answered, in all.",
        "Lower --hung-after if servers hang rather than die.",
    ),
    Panel(
        "Attempts beyond the first",
        "cps",
        Rate("psfleet_retries_total", _EACH),
        "Calls of a worker that were made again.",
        "The network or a server loses answers; see deaths.",
        Alert("PsfleetManyRetries", "> 1", "5m"),
    ),
    Panel(
        "Pushes that came again",
        "short",
        Level("psfleet_duplicate_pushes_total", _EACH),
        "Pushes that a server had applied before; they changed nothing.",
        "Normal after restarts.",
    ),
    Panel(
        "Torn steps",
        "short",
        Level("psfleet_torn_steps_total"),
        "Steps of dead workers that only some of the servers have.",
        "Sync mode has none; elsewhere a few do no harm.",
    ),
    Panel(
        "Bytes not on the disk yet",
        "bytes",
        Level("psfleet_log_unsynced_bytes", _EACH),
        "What the log of a server or a standby holds that a loss of power would take; only with log+fsync.",
        "If it stays high, the disk is too slow.",
    ),
    Panel(
        "Time of a sync to disk, 99th percentile",
        "s",
        Quantile(0.99, "psfleet_log_sync_seconds", _EACH),
        "Time for the disk to keep a log; pushes wait for it with log+fsync.",
        "Use a faster disk, or --durability log.",
    ),
    Panel(
        "Age of the last snapshot",
        "s",
        Age("psfleet_snapshot_timestamp_seconds"),
        "Time since the last snapshot of the whole job was complete.",
        "See the next panel.",
    ),
    Panel(
        "Wait for a snapshot",
        "short",
        Ratio(Level("psfleet_snapshot_wait_seconds"), Level("psfleet_snapshot_interval_seconds")),
        "Time since the last snapshot, or since the start, in units of --snapshot-every; 0 without new "
        "pushes.",
        "Above 2 a snapshot takes too long or fails: the log of server 0 says why.",
        Alert("PsfleetSnapshotOverdue", "> 3"),
    ),
    Panel(
        "Size of the last snapshot",
        "bytes",
        Level("psfleet_snapshot_bytes"),
        "Bytes of the last snapshot's files.",
        "Take deltas if it is large.",
    ),
    Panel(
        "Standby is ready",
        "short",
        Level("psfleet_standby_ready", _EACH),
        "1: the standby of a server has all that its server has and could take over; 0: it copies, or there "
        "is none.",
        "If it stays at 0, the standby's log says why.",
        Alert("PsfleetStandbyMissing", "== 0", "5m"),
    ),
    Panel(
        "Records that the standby lacks",
        "short",
        Level("psfleet_standby_lag_records", _EACH),
        "Records of a server that its standby has not taken yet; answers wait for them.",
        "The standby's machine or the network is too slow.",
    ),
    Panel(
        "Bytes that wait for the standby",
        "bytes",
        Level("psfleet_standby_queued_bytes", _EACH),
        "Records of a server that are not on their way to its standby yet; at 256 MiB pushes wait.",
        "The standby's machine or the network is too slow.",
        # 64 MiB, a quarter of the size at which pushes wait.
        Alert("PsfleetStandbyBehind", "> 67108864", "5m"),
    ),
    Panel(
        "Taken by standbys",
        "Bps",
        Rate("psfleet_standby_taken_bytes_total", _EACH),
        "Bytes of records that a standby has taken, its first copy too.",
        "Compare it with what is sent to standbys.",
    ),
    Panel(
        "Tables of standbys",
        "bytes",
        Level("psfleet_standby_table_bytes", _EACH),
        "Memory of the tables in a standby; while it copies, less than its server's.",
        "See the memory of tables.",
    ),
)
_WIRE = section(
    "Network",
    Panel(
        "Received by servers",
        "Bps",
        Rate("psfleet_received_bytes_total", _EACH),
        "Bytes of training calls, with those in shared memory.",
        "Compress gradients (--wire bf16 or int8), or merge steps.",
    ),
    Panel(
        "Sent by servers",
        "Bps",
        Rate("psfleet_sent_bytes_total", _EACH),
        "Bytes of pulled values.",
        "Compress weights (--wire bf16).",
    ),
    Panel(
        "Received with pushes",
        "Bps",
        Rate("psfleet_push_bytes_total", _EACH),
        "Bytes of pushes, and of gradients in shared memory.",
        "Compress gradients, or merge steps.",
    ),
    Panel(
        "Received with pulls",
        "Bps",
        Rate("psfleet_pull_bytes_total", _EACH),
        "Bytes of pulls: the ids whose rows are asked for.",
        "Use larger batches, in which more ids repeat.",
    ),
    Panel(
        "Received with exchanges",
        "Bps",
        Rate("psfleet_exchange_bytes_total", _EACH),
        "Bytes of pushes with the next pull behind them; of those in shared memory the ids alone.",
        "As for pushes and pulls.",
    ),
    Panel(
        "Saved by compression",
        "Bps",
        Rate("psfleet_saved_bytes_total", ("role",)),
        "Bytes by which gradients (of workers) and values (of servers) would be longer in float32.",
        "0 without --wire.",
    ),
    Panel(
        "Sent to standbys",
        "Bps",
        Rate("psfleet_standby_bytes_total", _EACH),
        "Bytes of records for standbys.",
        "About what servers receive; 0 while a server has no standby.",
    ),
    Panel(
        "Written to logs",
        "Bps",
        Rate("psfleet_log_bytes_total", _EACH),
        "Bytes of records that servers and standbys keep.",
        "A snapshot shortens the log: --snapshot-every.",
    ),
)
PROCESSES: tuple[Panel, ...] = (*_MEMORY, *_SKEW, *_RELIABILITY, *_WIRE)

PANELS: tuple[Panel, ...] = (*TRAINING, *PROCESSES)
"""All panels, in the order in which an operator would look at them.

The page of a job, the Grafana dashboard, the alert rules and docs/watch.md are generated from this table
(tools/generate_panels.py). A test sends every query to a real Prometheus.
"""
