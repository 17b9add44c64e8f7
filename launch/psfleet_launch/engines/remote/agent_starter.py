"""A local command that starts agents elsewhere, as `ssh` and `srun` do.

The agents read their credentials from its standard input, which then stays open: the end of that input is
the end of the agents, even where the end of the command itself is not.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from psfleet_launch.job.guard import MARKER

_AGENT = ("-m", "psfleet_launch.commands.psfleet_cli", "agent", "--credentials", "-")
_GRACE = 5.0  # seconds for the command to end by itself


def agent_command(endpoint: str, python: str = "") -> list[str]:
    """The command of an agent that reads its credentials from standard input.

    Args:
        python: On the machine of the agent; empty: at the path of this one's.
    """
    return [python or sys.executable, *_AGENT, "--join", endpoint]


class AgentStarter:
    """The command while it runs.

    Args:
        output: The file that takes what the command and its agents write.
        token: Token of the job, so that the guard finds the command.
    """

    def __init__(self, command: Sequence[str], invitation: bytes, output: Path, token: str) -> None:
        self._output = output
        environment: Mapping[str, str] = {**os.environ, MARKER: token}
        with output.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the launcher
            )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended; `lines` say why
            self._process.stdin.write(invitation)
            self._process.stdin.flush()

    @property
    def exit_code(self) -> int | None:
        """Exit code of the command; None: it runs."""
        return self._process.poll()

    def lines(self) -> list[str]:
        """Return the output of the command and its agents, without empty lines."""
        lines = self._output.read_text(errors="replace").split("\n")
        return [line.strip() for line in lines if line.strip()]

    def let_go(self) -> None:
        """Close the standard input of the agents."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def wait(self) -> None:
        """Wait for the end of the command, for a moment; then kill it."""
        try:
            self._process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
