"""Panels about processes: memory, load, deaths and traffic. Also has PANELS, the table of all panels.

Each Panel has a query, its meaning and advice; panel.py explains the classes. Run tools/generate_panels.py
after a change, because the Grafana dashboard, the alert rules and docs/watch.md are generated from PANELS.
"""

from psfleet.core.base.panels.panel import (
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
from psfleet.core.base.panels.training_panels import TRAINING

_TABLE, _EACH = ("table",), ("role", "rank")

_MEMORY = section(
    "Memory",
    Panel(
        "Memory against the limit",
        "percentunit",
        Ratio(
            Level("psfleet_memory_used_bytes", _EACH), Level("psfleet_memory_limit_bytes", _EACH)
        ),
        "Memory of a server's tables, and of pushes that wait for their round, as a share of what "
        "--server-memory allows them.",
        "Above 100 % pushes are refused: raise the limit, use more servers, or limit rows (CapacityEntry).",
        Alert("PsfleetMemoryShort", "> 0.9", severity="critical"),
    ),
    Panel(
        "Rows",
        "short",
        Level("psfleet_table_rows", _TABLE),
        "Rows of a sparse table on all servers.",
        "If the number grows without end, admit only frequent ids (CountFilterEntry), or let rows expire.",
    ),
    Panel(
        "Memory of tables",
        "bytes",
        Level("psfleet_table_bytes", _TABLE),
        "Rows, optimizer state and index of a table on all servers.",
        "For advice see the panel Rows.",
    ),
    Panel(
        "Rows that came",
        "cps",
        Rate("psfleet_admitted_rows_total", _TABLE),
        "Rows per second that pushes have added.",
        "The rate should fall during training. If it does not, ids never repeat: check how they are made.",
    ),
    Panel(
        "Rows that went",
        "cps",
        Rate("psfleet_dropped_rows_total", _TABLE),
        "Rows per second that were evicted, or removed in another way.",
        "If many rows are removed and added again, the capacity is too small.",
    ),
    Panel(
        "Ids that wait for a row",
        "short",
        Level("psfleet_candidate_ids", _TABLE),
        "Ids that are not pushed often enough yet to get a row.",
        "If no id gets a row, lower the count of the entry.",
    ),
    Panel(
        "Unknown ids in pulls",
        "percentunit",
        Ratio(Rate("psfleet_unknown_ids_total", _TABLE), Rate("psfleet_pulled_rows_total", _TABLE)),
        "Share of the pulled ids that have no row. Their initial values are returned.",
        "If it is high after the first epoch, ids are hashed in another way than in training, or the entry "
        "admits too few.",
    ),
    Panel(
        "Rows on disk found in memory",
        "percentunit",
        Ratio(
            Rate("psfleet_disk_rows_found_total", _TABLE),
            Rate("psfleet_disk_rows_used_total", _TABLE),
        ),
        "For tables on disk (--server-disk): share of the requested rows that were in memory.",
        "If it is low and calls wait, raise --server-memory or use more servers.",
    ),
    Panel(
        "Rows read from disk",
        "cps",
        Rate("psfleet_disk_rows_read_total", _TABLE),
        "Rows per second that were read from disk. Each costs a read of 4 KiB.",
        "See the panel Rows on disk found in memory.",
    ),
    Panel(
        "Rows written to disk",
        "cps",
        Rate("psfleet_disk_rows_written_total", _TABLE),
        "Rows per second that were moved to disk, in large writes, to free memory for others.",
        "See the panel Rows on disk found in memory.",
    ),
    Panel(
        "Waiting for the disk",
        "percentunit",
        Rate("psfleet_disk_wait_seconds_total", _TABLE, aggregate="avg"),
        "Share of the time in which calls waited for rows on disk, as the mean over the servers.",
        "Near 100 % the disk is the bottleneck: raise --server-memory, or use more servers.",
    ),
    Panel(
        "Resident memory",
        "bytes",
        Level("psfleet_resident_bytes", _EACH),
        "Memory of a process as the operating system reports it.",
        "Compare it with the memory of the machine. A standby needs about as much as its server.",
    ),
)
_SKEW = section(
    "Balance",
    Panel(
        "Skew between servers",
        "short",
        Skew(Rate("psfleet_received_bytes_total", _EACH)),
        "Bytes that the busiest server receives, divided by the mean over all servers. 1 is perfectly even.",
        "Above 1.5 one server has a few ids that occur very often (see Share of the hottest id), or a large "
        "dense table (divide it with servers=).",
        # The skew of two servers is at most 2: one gets everything, which is twice the mean.
        Alert("PsfleetSkewedServers", "> 1.5", "10m"),
    ),
    Panel(
        "Skew of rows",
        "short",
        Skew(Rate("psfleet_pulled_rows_total", _EACH)),
        "Rows that the busiest server reads, divided by the mean over all servers. 1 is perfectly even.",
        "Rows are distributed by a hash, so only small tables should be uneven.",
    ),
    Panel(
        "Share of the hottest id",
        "percentunit",
        Level("psfleet_hottest_id_share", _TABLE, aggregate="max"),
        "Share of the most frequent id among a table's ids in the batches. Workers sample their batches "
        "while somebody watches.",
        'From 10 % on, the worker\'s log names the id. If it means "missing value", leave it out.',
    ),
    Panel(
        "Share of the 100 hottest ids",
        "percentunit",
        Level("psfleet_hot_ids_share", _TABLE, aggregate="max"),
        "Share of the 100 most frequent ids among a table's ids in the batches.",
        "If it is high, most ids of a batch repeat. Larger batches then cost servers less per sample.",
    ),
)
_RELIABILITY = section(
    "Recovery",
    Panel(
        "Processes",
        "short",
        Level("psfleet_process_up", ("role",)),
        "Number of servers, standbys and workers that are running.",
        "If one is missing, see the launcher's output and that process's log.",
    ),
    Panel(
        "Deaths",
        "short",
        Level("psfleet_deaths_total", _EACH),
        "Processes that ended with an error or by a signal.",
        "The log of the process says why. A process that dies repeatedly mostly lacks memory.",
        Alert("PsfleetProcessDied", "> 0", "0m"),
    ),
    Panel(
        "Restarts",
        "short",
        Level("psfleet_restarts_total", _EACH),
        "Processes that were started again.",
        "For the causes see the panel Deaths.",
    ),
    Panel(
        "Takeovers",
        "short",
        Level("psfleet_takeover_seconds_count", _EACH),
        "How often a standby took the place of its server.",
        "Every takeover pauses training; the next panel shows for how long.",
    ),
    Panel(
        "Time of takeovers",
        "s",
        Level("psfleet_takeover_seconds_sum", _EACH),
        "Total time between the deaths of servers and the first replies of their standbys.",
        "If servers hang rather than die, lower --hung-after.",
    ),
    Panel(
        "Attempts beyond the first",
        "cps",
        Rate("psfleet_retries_total", _EACH),
        "Calls per second that a worker had to repeat.",
        "The network loses messages, or a server died: see the panel Deaths.",
        Alert("PsfleetManyRetries", "> 1", "5m"),
    ),
    Panel(
        "Pushes that came again",
        "short",
        Level("psfleet_duplicate_pushes_total", _EACH),
        "Pushes that arrived a second time. They changed nothing.",
        "This is normal after restarts.",
    ),
    Panel(
        "Torn steps",
        "short",
        Level("psfleet_torn_steps_total"),
        "Steps of dead workers that only some of the servers have.",
        "In sync mode there are none. In other modes a few do no harm.",
    ),
    Panel(
        "Bytes not on the disk yet",
        "bytes",
        Level("psfleet_log_unsynced_bytes", _EACH),
        "Bytes of a log that a power loss would destroy, in a job with --durability log+fsync.",
        "If it stays high, the disk is too slow.",
    ),
    Panel(
        "Time of a sync to disk, 99th percentile",
        "s",
        Quantile(0.99, "psfleet_log_sync_seconds", _EACH),
        "Time until a log is on the disk. With log+fsync, pushes wait for it.",
        "If it is long, use a faster disk, or --durability log.",
    ),
    Panel(
        "Age of the last snapshot",
        "s",
        Age("psfleet_snapshot_timestamp_seconds"),
        "Time since the last snapshot of the job was complete.",
        "The next panel says whether that is too long.",
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
        "If it is too large, save only the changes (save_persistables with mode=1).",
    ),
    Panel(
        "Standby is ready",
        "short",
        Level("psfleet_standby_ready", _EACH),
        "1 if the standby of a server has everything that its server has, and could take over. 0 if it is "
        "still copying, or if there is none.",
        "If it stays at 0, the standby's log says why.",
        Alert("PsfleetStandbyMissing", "== 0", "5m"),
    ),
    Panel(
        "Records that the standby lacks",
        "short",
        Level("psfleet_standby_lag_records", _EACH),
        "Records of a server that its standby has not received yet. Replies to workers wait for them.",
        "If it is high, the standby's machine or the network is too slow.",
    ),
    Panel(
        "Bytes that wait for the standby",
        "bytes",
        Level("psfleet_standby_queued_bytes", _EACH),
        "Bytes that a server still has to send to its standby. From 256 MiB on, pushes wait.",
        "If it is high, the standby's machine or the network is too slow.",
        # 64 MiB, a quarter of the size at which pushes wait.
        Alert("PsfleetStandbyBehind", "> 67108864", "5m"),
    ),
    Panel(
        "Taken by standbys",
        "Bps",
        Rate("psfleet_standby_taken_bytes_total", _EACH),
        "Bytes per second that a standby has received, including its first copy.",
        "It should be about what the panel Sent to standbys shows.",
    ),
    Panel(
        "Tables of standbys",
        "bytes",
        Level("psfleet_standby_table_bytes", _EACH),
        "Memory of the tables in a standby. It is less than its server's while the standby still copies.",
        "See the panel Memory of tables.",
    ),
)
_WIRE = section(
    "Network",
    Panel(
        "Received by servers",
        "Bps",
        Rate("psfleet_received_bytes_total", _EACH),
        "Bytes per second of training calls, including those in shared memory.",
        "To reduce it, compress gradients (--wire bf16 or int8), or merge steps (gradient_merge).",
    ),
    Panel(
        "Sent by servers",
        "Bps",
        Rate("psfleet_sent_bytes_total", _EACH),
        "Bytes per second of pulled values.",
        "To reduce it, compress weights (--wire bf16).",
    ),
    Panel(
        "Received with pushes",
        "Bps",
        Rate("psfleet_push_bytes_total", _EACH),
        "Bytes per second of pushes, including gradients in shared memory.",
        "To reduce it, compress gradients (--wire), or merge steps (gradient_merge).",
    ),
    Panel(
        "Received with pulls",
        "Bps",
        Rate("psfleet_pull_bytes_total", _EACH),
        "Bytes per second of pull requests, which name the ids.",
        "To reduce it, use larger batches, in which more ids repeat.",
    ),
    Panel(
        "Received with exchanges",
        "Bps",
        Rate("psfleet_exchange_bytes_total", _EACH),
        "Bytes per second of pushes that travel with the next pull. In shared memory only the ids count.",
        "To reduce it, do what the panels Received with pushes and Received with pulls say.",
    ),
    Panel(
        "Saved by compression",
        "Bps",
        Rate("psfleet_saved_bytes_total", ("role",)),
        "Bytes per second that float32 would add to gradients (of workers) and values (of servers).",
        "It is 0 without --wire.",
    ),
    Panel(
        "Sent to standbys",
        "Bps",
        Rate("psfleet_standby_bytes_total", _EACH),
        "Bytes per second that servers send to standbys.",
        "It should be about what servers receive. It is 0 while a server has no standby.",
    ),
    Panel(
        "Written to logs",
        "Bps",
        Rate("psfleet_log_bytes_total", _EACH),
        "Bytes per second that servers and standbys write to their logs.",
        "To keep the logs short, take snapshots (--snapshot-every).",
    ),
)
PROCESSES: tuple[Panel, ...] = (*_MEMORY, *_SKEW, *_RELIABILITY, *_WIRE)

PANELS: tuple[Panel, ...] = (*TRAINING, *PROCESSES)
"""All panels, in the order in which an operator would look at them.

The page of a job, the Grafana dashboard, the alert rules and docs/watch.md are generated from this table
(tools/generate_panels.py). A test sends every query to a real Prometheus.
"""
