"""Times of row look-ups over gRPC in an open loop, with and without training that the service follows.

A service follows two servers with a table of a million ids and rows of 16. A client in another process
requests 200 ids per call at a steady rate over a few connections. The time of a call is measured from the
moment at which it was due. A worker pushes 20,000 rows per second in one run, and none in the next.
"""

import contextlib
import json
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
from processes import environment
from reporting import Report, arguments, finish
from serving import cpu_of

from psfleet.core.engine.rules import make_rule
from psfleet.core.engine.runtime_interface import Gradient
from psfleet.core.engine.schema.table import TableSpec
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet.serving import ServingClient

DIM, IDS, ROWS = 16, 200, 1_000_000
CONNECTIONS, PUSHED = 4, 20_000
SPEC = TableSpec("rows", "sparse", (DIM,), make_rule("adam", {}))


def ask(address: str, rate: int, calls: int) -> None:
    """Make calls when they are due, with a thread for each connection, and print their milliseconds."""
    times: list[float] = []
    begin = time.monotonic() + 0.5

    def work(number: int) -> None:
        dice = np.random.default_rng(number)
        batches = [dice.integers(0, ROWS, IDS) for _ in range(64)]
        with ServingClient(address) as client:
            client.look_up("rows", batches[0])
            for call in range(number, calls, CONNECTIONS):
                due = begin + call / rate
                time.sleep(max(due - time.monotonic(), 0.0))
                client.look_up("rows", batches[call % len(batches)])
                times.append((time.monotonic() - due) * 1e3)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(CONNECTIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps(times))


def measured(address: str, pid: int, rate: int, calls: int) -> dict[str, float]:
    """Return the milliseconds of the calls, and the CPU time of the service for each."""
    command = [sys.executable, __file__, "--ask", address, str(rate), str(calls)]
    before = cpu_of(pid)
    process = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, env=environment(), check=True
    )
    times = json.loads(process.stdout)
    cpu = (cpu_of(pid) - before) / calls
    percentiles = {f"p{level:g} ms": float(np.percentile(times, level)) for level in (50, 90, 99)}
    return {**percentiles, "CPU us / call": cpu * 1e6}


def main() -> None:
    """Measure and print."""
    if sys.argv[1:2] == ["--ask"]:
        ask(sys.argv[2], *map(int, sys.argv[3:5]))
        return
    parser = arguments(__doc__ or "")
    parser.add_argument("--rate", type=int, default=2000, help="calls in a second")
    options = parser.parse_args()
    calls = options.rate * (2 if options.short else 15)
    report = Report("look_ups", f"Look-ups of {IDS} ids x {DIM}, {options.rate:,} calls a second")
    over, pushes = threading.Event(), threading.Event()
    with LocalFleet(servers=2, workers=1) as fleet, contextlib.ExitStack() as stack:
        runtime = fleet.connect(0, "async")
        runtime.create(SPEC)
        for ids in np.array_split(np.arange(ROWS), 100):
            gradient = np.full((len(ids), DIM), 0.01, np.float32)
            runtime.push([Gradient(SPEC.key, gradient, ids, 1e-3)]).wait()

        def push() -> None:
            dice, due = np.random.default_rng(0), time.monotonic()
            while not over.wait(max(due - time.monotonic(), 0.0)):
                due = max(due, time.monotonic() - 1.0) + IDS / PUSHED
                if pushes.is_set():
                    ids = dice.choice(ROWS, IDS, replace=False)
                    gradient = np.full((IDS, DIM), 0.01, np.float32)
                    runtime.push([Gradient(SPEC.key, gradient, ids, 1e-3)]).wait()

        thread = threading.Thread(target=push)
        thread.start()
        stack.callback(thread.join)
        stack.callback(over.set)
        line = ["serve", "--follow", ",".join(fleet.endpoints), "--port", "0", "--http-port", "0"]
        command = [sys.executable, "-m", "psfleet_launch.commands.psfleet_cli", *line]
        service: Any = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=environment()
        )
        stack.callback(service.wait)
        stack.callback(service.terminate)
        address = service.stdout.readline().partition("gRPC ")[2].partition(",")[0]
        for run in range(options.runs):
            for name, is_on in (("followed, quiet", False), ("followed, 20,000 rows/s", True)):
                (pushes.set if is_on else pushes.clear)()
                figures = measured(address, service.pid, options.rate, calls)
                report.rows.append({"contender": name, "run": run + 1, **figures})
        over.set()
        thread.join()
        runtime.close()
    finish(report, options.json)


if __name__ == "__main__":
    sys.exit(main())
