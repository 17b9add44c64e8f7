"""Runs small scripts, each in a process of its own that is forked from one with the library loaded.

Reads lines of JSON, `{"script": path, "arguments": [...], "variables": {...}, "folder": path}`; after each it
answers with a line, the exit code. Output goes to `out` and `err` in the folder.
"""

import json
import os
import runpy
import sys
from pathlib import Path

import numpy as np

from psfleet import client, fleet, layers, optimizer  # noqa: F401  # loaded for the scripts
from psfleet.execution import executor  # noqa: F401  # likewise
from psfleet.kernels import dedup


def run(asked: dict[str, object]) -> None:
    """The forked process: what `python SCRIPT` does, or `psfleet-launch` where there is no script."""
    for name, number in (("out", 1), ("err", 2)):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT, 0o600), number)
    os.environ.update(asked["variables"])  # type: ignore[call-overload]
    script, arguments = str(asked["script"]), list(asked["arguments"])  # type: ignore[call-overload]
    if not script:
        from psfleet_launch.commands.launch_command import main

        sys.exit(main(arguments))
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


def main() -> None:
    dedup.dedup(np.zeros(1, np.int64), 1)  # the kernels come from their cache once
    for line in sys.stdin:
        asked = json.loads(line)
        child = os.fork()
        if not child:
            os.chdir(asked["folder"])
            run(asked)
            sys.exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
