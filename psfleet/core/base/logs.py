"""Logging of psfleet: the standard `logging` with one handler that writes to standard error.

A module logs with `_log = log_of(__name__)`. It may pass the subject of a line with `extra={"round": 7}`
(see FIELDS). Levels and format come from PSFLEET_LOG and PSFLEET_LOG_FORMAT. State machines do not log; the
code around them does.
"""

import contextlib
import json
import logging
import os
import sys
import threading
import time
from datetime import datetime
from typing import Any

from typing_extensions import override

from psfleet.core.base.settings.declaration import from_variable
from psfleet.core.base.settings.declared_settings import UserSettings
from psfleet.core.base.settings.environment import unknown_variables
from psfleet.core.base.settings.kinds import ROOT, parse_levels

_FEW = 5  # lines that a FirstLinesLog logs
_QUIET = 1.0  # least seconds between two lines of a RateLimitedLog

FIRST_NONFINITE = "first NaN or infinity: "
"""Beginning of server 0's line about the first NaN of a job. The line has its worker, step, table and id."""

FIELDS = ("step", "round", "snapshot", "view", "worker", "incarnation", "table", "seconds", "bytes")
"""Names that `extra` of a log call may have. JSON lines show all of them, text lines the first three."""

_SHOWN = FIELDS[:3]


_levelled = [ROOT]
_warned: set[str] = set()
_ROOT = logging.getLogger(ROOT)


def log_of(module: str) -> logging.Logger:
    """Return a module's logger. `psfleet_server.engine.liveness` logs as `psfleet.server.engine.liveness`."""
    return logging.getLogger(module.replace("psfleet_", "psfleet.", 1))


class RateLimitedLog:
    """Logs warnings, but at most one per second. Any thread may call."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._said_at = float("-inf")
        self._unsaid = 0

    def say(self, line: str) -> None:
        """Log the line, or only count it if a line was logged within the last second.

        The next logged line says how many lines were left out.
        """
        with self._lock:
            now = time.monotonic()
            if now - self._said_at < _QUIET:
                self._unsaid += 1
                return
            suffix = f" (and {self._unsaid} more)" if self._unsaid else ""
            self._said_at, self._unsaid = now, 0
        self._log.warning(line + suffix)


class FirstLinesLog:
    """Logs the first five warnings of a kind, such as bad rows of a source. One thread calls."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._count = 0

    def say(self, line: str) -> None:
        """Log the line, unless five lines were logged before."""
        self._count += 1
        if self._count <= _FEW:
            suffix = "; more such lines are left out" if self._count == _FEW else ""
            self._log.warning(f"{line}{suffix}")


def set_up_logs(role: str | None = None, rank: int = 0) -> None:
    """Apply PSFLEET_LOG and PSFLEET_LOG_FORMAT to this process. A later call replaces an earlier one.

    Also warns, once per process, of each unknown variable whose name begins with PSFLEET_.

    Args:
        role: Role of this process in its fleet: lines begin with time, level, role and rank. None if the
            process trains alone: lines are plain sentences.

    Raises:
        ConfigError: A variable has an invalid value.
    """
    levels = parse_levels(from_variable(UserSettings, "log_levels", os.environ))
    process = f"{role}.{rank}" if role else ""
    is_json = from_variable(UserSettings, "log_format", os.environ) == "json"
    for name in _levelled:
        logging.getLogger(name).setLevel(logging.NOTSET)
    _levelled[:] = levels
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    _HANDLER.setFormatter(_JsonFormatter(process) if is_json else _TextFormatter(process))
    for sentence in unknown_variables():
        # The launcher has warned for all processes of its job.
        if "PSFLEET_JOB" not in os.environ and sentence not in _warned:
            _warned.add(sentence)
            _ROOT.warning(sentence)


class _TextFormatter(logging.Formatter):
    """Formats records as lines for people. The traceback of an error follows its line."""

    default_msec_format = "%s.%03d"

    def __init__(self, process: str) -> None:
        begin = f"%(asctime)s %(levelname)s {process} " if process else ""
        super().__init__(f"{begin}%(message)s")
        self._has_fields = bool(process)

    @override
    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = " ".join(
            f"{name}={value}" for name, value in _fields(record).items() if name in _SHOWN
        )
        return super().formatMessage(record) + (
            f" [{fields}]" if fields and self._has_fields else ""
        )


class _JsonFormatter(logging.Formatter):
    """Formats records as lines for programs, each a JSON object."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    @override
    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created).astimezone()
        line = {
            "time": at.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": self._process,
            "pid": record.process,
            "text": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class _StderrHandler(logging.Handler):
    """Writes to the present sys.stderr.

    Ignores errors, so lines are lost if it is closed or the disk is full.
    """

    @override
    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError, ValueError):
            print(self.format(record), file=sys.stderr, flush=True)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name in FIELDS if (value := getattr(record, name, None)) is not None}


_HANDLER = _StderrHandler()
_HANDLER.setFormatter(_TextFormatter(""))
_ROOT.addHandler(_HANDLER)
_ROOT.propagate = False  # else a script's own handlers would write each line again
_ROOT.setLevel(logging.INFO)
