"""Programs that tests run to their end."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

IN_DOCS = pytest.mark.skipif(
    not os.environ.keys() & {"PSFLEET_TEST_DOCS", "PSFLEET_TORTURE"},
    reason="make docs runs this test",
)
"""Tests of what pages print: programs, notebooks, long runs of the examples, benchmarks behind figures."""
MORE = int(os.environ.get("PSFLEET_TORTURE", "0"))
"""Seeds beside those of continuous integration."""
PYTHONPATH = os.pathsep.join(entry for entry in sys.path if entry)
"""Gives a new interpreter the modules of this one."""


def ended(
    command: Sequence[str | Path], timeout: float = 150.0, **how: Any
) -> subprocess.CompletedProcess[str]:
    """The command once it has ended, with its exit code and what it has printed.

    how: As for `subprocess.run`.
    """
    how = {"capture_output": True, "text": True, "check": False, **how}
    process: subprocess.CompletedProcess[str] = subprocess.run(command, timeout=timeout, **how)
    return process
