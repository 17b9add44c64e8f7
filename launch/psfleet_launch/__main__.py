"""Entry point of `psfleet-launch` and `python -m psfleet_launch`.

It imports the launcher's modules within a function, so that Ctrl-C during the imports ends the program
without a stack trace.
"""

import faulthandler
import os
import sys


def main() -> int:
    """Run the command, and return its exit code."""
    _open_missing_streams()
    faulthandler.enable(2)  # a crash of machine code shows the stack of every thread
    try:
        from psfleet_launch.commands.launch_command import main as run  # imports most of psfleet

        return run()
    except KeyboardInterrupt:  # before a job was started; a job handles the signal itself
        return 130


def _open_missing_streams() -> None:
    """Open closed standard streams as /dev/null. Otherwise the next opened file would get their numbers."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None and os.open(os.devnull, os.O_RDWR) == number:
            setattr(sys, name, open(number, "w" if number else "r"))  # noqa: SIM115  # stays open


if __name__ == "__main__":
    sys.exit(main())
