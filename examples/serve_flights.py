"""Trains on flights, and serves the model meanwhile; then serves a compressed export (docs/serving.md).

    psfleet-launch --servers 2 --workers 1 examples/serve_flights.py    # or: make serve
    python examples/serve_flights.py --flights 20000                    # one process, without live serving

While servers train, a prediction service follows them and predicts flights of November and December over
HTTP. After training, the model is served in two versions: version 1 is the inference model in float32, and
version 2 its export in int8. The AUC of both is printed. One call switches the traffic back from version 2 to
version 1.
"""

import argparse
import contextlib
import http.client
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import flights
import flights_data
import numpy as np
from flights_data import Flights
from numpy.typing import NDArray

import psfleet as ps
from psfleet import fleet, metrics, serving

TABLES = 6  # of the model


def main() -> None:
    """Train while a service follows, export, serve, and request predictions."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--flights", type=int, metavar="N", help="train on N flights only")
    options = parser.parse_args()
    fleet.init(strategy=fleet.DistributedStrategy(a_sync=True))  # the launcher's --sync wins
    settings = flights.Settings()
    data = flights_data.load().ranked(range(1, 10))
    rows = np.random.default_rng(settings.seed).permutation(data.rows(range(1, 10)))
    model = flights.Model(settings)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with followed(data):
            flights.train(model, data, rows[: options.flights], settings)
            with ps.program_guard(model.program):
                fleet.save_inference_model(
                    str(folder / "late" / "1"), ["ids", "numbers"], [model.probability]
                )
        serving.export(str(folder / "late" / "1"), folder / "late" / "2", "npz", "int8")
        serve(serving.VersionedModel(str(folder / "late")), data)
    fleet.stop_worker()


def probability() -> Any:
    """Return the output of the model that the service serves."""
    return flights.Model(flights.Settings()).probability


@contextlib.contextmanager
def followed(data: Flights) -> Iterator[None]:
    """Request predictions from a service that follows this job's servers, during and after the block."""
    over, servers = threading.Event(), ",".join(fleet.server_endpoints())
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask_live, servers, data, over) if servers else None
        try:
            yield
        finally:
            over.set()
        if asking is not None:
            asking.result()


def ask_live(servers: str, data: Flights, over: threading.Event) -> None:
    """Print every second how good the live predictions are."""
    with serving.Follower(servers) as rows:
        while len(rows.specs()) < TABLES and not over.is_set():
            time.sleep(0.05)
    line = ["serve", "live=serve_flights:probability", "--follow", servers]
    command = [
        sys.executable,
        "-m",
        "psfleet_launch.commands.psfleet_cli",
        *line,
        "--port",
        "0",
        "--http-port",
        "0",
    ]
    variables = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables) as service:
        try:
            assert service.stdout is not None
            address = service.stdout.readline().rpartition("HTTP ")[2].strip()
            while not over.wait(1.0):
                print(f"live: AUC {auc_of(address, 'live', data, 4096):.4f}, {state(address)}")
            ended = time.monotonic()
            while state(address)["age"] > time.monotonic() - ended:  # a cut from before the end
                time.sleep(0.02)
            print(f"live: AUC {auc_of(address, 'live', data):.4f} in the end, {state(address)}")
        finally:
            service.terminate()


def state(address: str) -> Any:
    """Return the number of the version that is served live (its cut), and its age in seconds."""
    with urllib.request.urlopen(f"http://{address}/v1/models/live") as reply:
        [version] = json.load(reply)["versions"]
    return {name: version[name] for name in ("cut", "age")}


def serve(model: serving.VersionedModel, data: Flights) -> None:
    """Request predictions for the flights of November and December from a service, for each version."""
    with serving.Server({"late": model}, max_batch=4096) as server:
        print(f"serving late: HTTP {server.http_address}, gRPC {server.grpc_address}")
        with serving.ServingClient(server.grpc_address) as client:
            for version in (2, 1):
                client.route("late", version, 100)
                print(f"version {version}: AUC {auc_of(server.http_address, 'late', data):.4f}")
            for line in client.lines():
                print(line)


def auc_of(address: str, name: str, data: Flights, flights_at_most: int = 10**9) -> float:
    """Return the AUC of the service's predictions for November and December."""
    rows, auc = data.rows(flights.TEST)[:flights_at_most], metrics.Auc("auc")
    for part in np.array_split(rows, len(rows) // 1024 + 1):
        auc.update(asked(address, name, data, part), data.late[part])
    return float(auc.eval())


def asked(address: str, name: str, data: Flights, rows: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the service's probability of being late for each of these flights."""
    inputs = {"ids": data.ids[rows].tolist(), "numbers": data.numbers[rows].tolist()}
    connection = http.client.HTTPConnection(address)
    try:
        connection.request("POST", f"/v1/models/{name}:predict", json.dumps({"inputs": inputs}))
        return np.array(json.load(connection.getresponse())["predictions"], np.float32)
    finally:
        connection.close()


if __name__ == "__main__":
    main()
