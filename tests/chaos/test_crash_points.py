"""PSFLEET_CRASH: a process that fails at a named point, for tests."""

import re
import signal
import sys

import pytest

from psfleet.core.base.errors import ConfigError
from psfleet.core.base.settings.environment import read_environment
from tests.programs import ended

_SCRIPT = """
from psfleet.core.base import crash_points
from psfleet.core.base.settings.environment import read_environment
read_environment()
for time in range(5):
    crash_points.reach("another point")
    crash_points.reach("a point", lambda: print("last act", time, flush=True))
"""


@pytest.mark.parametrize(
    ("crash", "code", "error"),
    [
        ("a point:3", -signal.SIGKILL, ""),
        ("a point:3:raise", 1, "SimulatedFault: PSFLEET_CRASH is a point:3:raise"),
        ("a point:6", 0, ""),
    ],
)
def test_a_process_fails_at_its_point(crash: str, code: int, error: str) -> None:
    """It does so when it reaches the point for the time that is said, after its last act."""
    process = ended([sys.executable, "-c", _SCRIPT], env={"PSFLEET_CRASH": crash})
    assert (process.returncode, process.stdout) == (code, "last act 2\n" if code else "")
    assert error in process.stderr


def test_a_wrong_point_is_refused_in_a_sentence() -> None:
    """A server does not start with it, and no traceback is shown."""
    said = "PSFLEET_CRASH is {!r}; it must be like append:3"
    server = {"PSFLEET_ROLE": "server", "PSFLEET_SERVERS": "127.0.0.1:0", "PSFLEET_WORKERS": "1"}
    for crash in ("append:0", "append:x", "append:1:burn", ":1"):
        with pytest.raises(ConfigError, match=re.escape(said.format(crash))):
            read_environment({**server, "PSFLEET_CRASH": crash})
    process = ended(
        [sys.executable, "-m", "psfleet_server"], env={**server, "PSFLEET_CRASH": "foo"}
    )
    assert process.returncode != 0
    assert "Traceback" not in process.stderr
    assert said.format("foo") in process.stderr, process.stderr
