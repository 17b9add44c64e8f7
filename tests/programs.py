"""Programs that tests run to their end."""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["ended"]


def ended(
    command: Sequence[str | Path], timeout: float = 150.0, **how: Any
) -> subprocess.CompletedProcess[str]:
    """The command once it has ended, with its exit code and what it has printed.

    how: As for `subprocess.run`.
    """
    how = {"capture_output": True, "text": True, "check": False, **how}
    done: subprocess.CompletedProcess[str] = subprocess.run(command, timeout=timeout, **how)
    return done
