"""A program that stands in for servers and workers and behaves as its first argument says.

As a server it says that it is ready and ends when every worker has left, or when it is asked to.
Workers leave by a file in the current folder. `name@N` is for worker N only; others succeed.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from psfleet.core.base.job_files import write_ready

RANK = int(os.environ["PSFLEET_RANK"])
WORKERS = int(os.environ["PSFLEET_WORKERS"])
SLEEPER = [sys.executable, "-c", "import time; print('child', flush=True); time.sleep(600)"]


def serve(behaviour: str) -> None:
    """The server's part."""
    if behaviour == "server-fails":
        sys.exit("no memory for the tables")
    if behaviour == "server-hangs":
        time.sleep(600)
    endpoint = os.environ["PSFLEET_SERVERS"].split(",")[RANK]
    ready = Path(os.environ["PSFLEET_READY_FILE"])
    write_ready(ready, RANK, endpoint.replace(":0", ":4711"), os.getpid())
    while sum(1 for _ in Path().glob("left.*")) < WORKERS:
        time.sleep(0.02)


def fails() -> None:
    """Raise, with its line in the log."""
    raise ValueError("feed 'ids' has shape (512, 9), the program wants (None, 10)")


def hangs() -> None:
    """Run until it is asked to stop."""
    print("hanging", flush=True)
    time.sleep(600)


def stubborn() -> None:
    """Run, whatever anybody asks."""

    def told(number: int, frame: object) -> None:
        print(f"got {signal.Signals(number).name}", flush=True)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, told)
    hangs()


def family() -> None:
    """Have a child in the same group and one in a session of its own, and fail once both run: what a child
    prints must not stand within the traceback."""
    for apart in (False, True):
        child = subprocess.Popen(SLEEPER, stdout=subprocess.PIPE, start_new_session=apart)
        assert child.stdout is not None
        child.stdout.readline()
    fails()


def family_hangs() -> None:
    """Have a child in the same group and one in a session of its own, and go on."""
    subprocess.Popen(SLEEPER)
    subprocess.Popen(SLEEPER, start_new_session=True)
    hangs()


def family_succeeds() -> None:
    """Leave a child behind."""
    subprocess.Popen(SLEEPER, start_new_session=True)


def tells_signals() -> None:
    """Say which signal came, save something, and end in order."""

    def told(number: int, frame: object) -> None:
        print(f"got {signal.Signals(number).name}", flush=True)
        time.sleep(0.2)
        print("saved", flush=True)
        sys.exit(0)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, told)
    hangs()


def tells() -> None:
    """Print what a script can see of its place."""
    print(
        json.dumps(
            {
                "arguments": sys.argv[1:],
                **{
                    name: value
                    for name, value in os.environ.items()
                    if name.startswith(("PSFLEET_", "OMP_", "PYTHONUNBUFFERED"))
                },
            }
        )
    )
    print("to stderr", file=sys.stderr)


def talks() -> None:
    """Print 4,000 lines in one write, which the launcher reads at once."""
    os.write(1, b"".join(b"line %d\n" % n for n in range(4000)))


def work(behaviour: str) -> None:
    """The worker's part."""
    Path(os.environ["PSFLEET_JOINED_FILE"]).touch()
    name, _, only = behaviour.partition("@")
    if name in globals() and only in ("", str(RANK)):
        globals()[name]()
    elif only:
        hangs()
    Path(f"left.{RANK}").touch()


if __name__ == "__main__":
    (serve if os.environ["PSFLEET_ROLE"] == "server" else work)(sys.argv[1])
