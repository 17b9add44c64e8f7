"""`psfleet-launch`, and `python -m psfleet_launch`: a light door, so that Ctrl-C is heard from the start."""

import faulthandler
import os
import sys


def main() -> int:
    """Run the command; its exit code."""
    _open_missing_streams()
    faulthandler.enable(2)  # a crash of machine code shows the stack of every thread
    try:
        from psfleet_launch.commands.launch_command import main as run  # loads much

        return run()
    except KeyboardInterrupt:  # before there was a job to stop
        return 130


def _open_missing_streams() -> None:
    """Streams that were closed lead nowhere; else the next file or socket would take their numbers."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None and os.open(os.devnull, os.O_RDWR) == number:
            setattr(sys, name, open(number, "w" if number else "r"))  # noqa: SIM115  # stays open


if __name__ == "__main__":
    sys.exit(main())
