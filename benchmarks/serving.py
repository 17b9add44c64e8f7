"""Predictions of a DeepFM: embedded, compared with plain torch; over HTTP and gRPC, with starlette and torch.

26 ids and 13 numbers per sample, tables of a million rows of 16 and of 1, MLP 400-400-1, batches of 1 and
100. The plain model has its tables as torch's own embeddings in memory; psfleet has the weights as a
snapshot. One thread of BLAS. CPU is that of the predicting process; the clients' is not counted. All
contenders take turns. The run takes 40 seconds on an idle machine.
"""

import argparse
import asyncio
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

FIELDS, NUMBERS, DIM = 26, 13, 16
ROWS = int(os.environ.get("SERVING_ROWS", "1000000"))
Ask = Callable[[Any], Any]


def plain_model() -> Any:
    """Return the model with torch's own embeddings."""
    import torch
    from torch import nn

    class DeepFM(nn.Module):
        """A weight for each id, products of embeddings, and an MLP over embeddings and numbers."""

        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.EmbeddingBag(ROWS, 1, mode="sum", sparse=True)
            self.deep = nn.Embedding(ROWS, DIM, sparse=True)
            width = FIELDS * DIM + NUMBERS
            layers = (nn.Linear(width, 400), nn.Linear(400, 400), nn.Linear(400, 1))
            self.mlp = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])

        def forward(self, batch: Any) -> Any:
            """Return the logit, float32 [n, 1]."""
            ids, numbers = (torch.as_tensor(batch[name]) for name in ("ids", "numbers"))
            factors = self.deep(ids)
            products = (factors.sum(1).square() - factors.square().sum(1)).sum(1, keepdim=True) / 2
            hidden = torch.cat([factors.flatten(1), numbers], 1)
            return self.wide(ids) + products + self.mlp(hidden)

    torch.set_num_threads(1)
    torch.manual_seed(1)
    return DeepFM()


def make_snapshot(folder: Path) -> None:
    """Write a snapshot of the model's weights."""
    import torch

    import psfleet
    import psfleet.torch as pst
    from psfleet import fleet

    fleet.init()
    model = plain_model()
    pst.convert(model, torch.optim.SGD(model.parameters(), 0.1))
    fleet.save_persistables(str(folder / "snapshot"))
    psfleet.reset()


def batches(size: int) -> list[dict[str, Any]]:
    """Return inputs as arrays."""
    dice = np.random.default_rng(size)
    return [
        {
            "ids": dice.integers(0, ROWS, (size, FIELDS)),
            "numbers": dice.random((size, NUMBERS), np.float32),
        }
        for _ in range(64)
    ]


def in_turn(names: list[str], runs: int) -> list[str]:
    """Return each name `runs` times, every second round in reverse order."""
    return [name for number in range(runs) for name in names[:: -1 if number % 2 else 1]]


def plain_predictor() -> Ask:
    """Return a function that predicts with plain torch, from arrays."""
    import torch

    model = plain_model().eval()

    def predict(batch: Any) -> Any:
        with torch.inference_mode():
            return model(batch).numpy()

    return predict


def embedded(folder: Path, runs: int, calls_of: dict[int, int]) -> dict[str, float]:
    """Return the CPU microseconds of a prediction, by contender and batch size."""
    from psfleet import serving

    psfleet_model = serving.load("serving:plain_model", checkpoint=folder / "snapshot")
    contenders = {"torch": plain_predictor(), "psfleet": psfleet_model}
    durations: dict[str, list[float]] = {}
    for size, calls in calls_of.items():
        inputs = batches(size)
        first, second = (predict(inputs[0]) for predict in contenders.values())
        assert np.allclose(first, second, atol=1e-6)
        for name in in_turn(list(contenders), runs):
            ask, start = contenders[name], time.process_time()
            for number in range(calls):
                ask(inputs[number % len(inputs)])
            seconds = (time.process_time() - start) / calls
            durations.setdefault(f"embedded {name}, batch {size}", []).append(seconds * 1e6)
    return {name: statistics.median(figures) for name, figures in durations.items()}


def serve(kind: str, folder: Path) -> None:
    """Run a service until its input ends: psfleet, or a plain one of starlette with torch."""
    if kind == "psfleet":
        from psfleet import serving

        model = serving.load("serving:plain_model", checkpoint=folder / "snapshot")
        with serving.Server({"model": model}) as server:
            print(server.http_address, server.grpc_address, flush=True)
            sys.stdin.read()
        return
    import socket

    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    predict = plain_predictor()

    async def answer(request: Request) -> JSONResponse:
        inputs = (await request.json())["inputs"]
        batch = {
            "ids": np.array(inputs["ids"], np.int64),
            "numbers": np.array(inputs["numbers"], np.float32),
        }
        return JSONResponse({"predictions": predict(batch)[:, 0].tolist()})

    app = Starlette(routes=[Route("/v1/models/model:predict", answer, methods=["POST"])])
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    port = listening.getsockname()[1]
    print(f"127.0.0.1:{port} none", flush=True)
    config = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="off", timeout_keep_alive=75
    )
    service = uvicorn.Server(config)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        ended = loop.run_in_executor(None, sys.stdin.read)
        served = asyncio.ensure_future(service.serve([listening]))
        await ended
        service.should_exit = True
        await served

    asyncio.run(run())


@contextmanager
def service(kind: str, folder: Path) -> Iterator[tuple[int, str, str]]:
    """Start a service in a process. Yields its pid, and its HTTP and gRPC addresses."""
    command = [sys.executable, __file__, "--serve", kind, "--folder", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdin
    assert process.stdout
    try:
        http_address, grpc_address = process.stdout.readline().split()
        yield process.pid, http_address, grpc_address
    finally:
        process.stdin.close()
        process.wait()


def cpu_of(pid: int) -> float:
    """Return the CPU seconds of the threads of a process."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread_file.read_text().split()[0]) for thread_file in threads) / 1e9


def over_http(address: str) -> Ask:
    """Return a function that requests predictions over one HTTP connection."""
    connection = http.client.HTTPConnection(address)

    def ask(body: Any) -> Any:
        connection.request("POST", "/v1/models/model:predict", body)
        reply = connection.getresponse()
        content = reply.read()
        assert reply.status == 200, content
        return content

    return ask


def over_grpc(address: str) -> Ask:
    """Return a function that requests predictions over one gRPC connection."""
    from psfleet.serving import ServingClient

    return ServingClient(address).predict


def over_grpcio(address: str) -> Ask:
    """Return the same function with gRPC's own client, as other languages have it."""
    import grpc

    from psfleet.core.net.v1 import serving_pb2 as messages
    from psfleet.serving.serving_client import _message

    channel = grpc.insecure_channel(address)
    ask = channel.unary_unary("/psfleet.v1.Prediction/Predict")

    def predict(batch: Any) -> Any:
        request = messages.PredictRequest()
        request.inputs.extend(_message(name, value) for name, value in batch.items())
        return ask(request.SerializeToString(), timeout=60)

    return predict


def bodies(size: int) -> list[bytes]:
    """Return inputs as JSON."""
    return [
        json.dumps({"inputs": {name: array.tolist() for name, array in batch.items()}}).encode()
        for batch in batches(size)
    ]


def services(folder: Path, runs: int, calls_of: dict[int, int]) -> dict[str, float]:
    """Return the service's CPU microseconds per request, and the median of its wall-clock time."""
    durations: dict[str, list[float]] = {}
    with service("psfleet", folder) as ours, service("starlette", folder) as peer:
        contenders = {
            "starlette + torch, JSON": (peer[0], over_http(peer[1]), bodies),
            "psfleet, JSON": (ours[0], over_http(ours[1]), bodies),
            "psfleet, gRPC": (ours[0], over_grpc(ours[2]), batches),
            "psfleet, gRPC, client of grpcio": (ours[0], over_grpcio(ours[2]), batches),
        }
        for size, calls in calls_of.items():
            made = {make: make(size) for make in (batches, bodies)}
            for name in in_turn(list(contenders), runs):
                pid, ask, make = contenders[name]
                inputs, walls, start = made[make], [], cpu_of(pid)
                for number in range(calls):
                    began = time.perf_counter()
                    ask(inputs[number % len(inputs)])
                    walls.append(time.perf_counter() - began)
                cpu = (cpu_of(pid) - start) / calls
                durations.setdefault(f"{name}, batch {size}", []).append(cpu * 1e6)
                durations.setdefault(f"{name}, batch {size}, wall", []).append(
                    statistics.median(walls) * 1e6
                )
    return {name: statistics.median(figures) for name, figures in durations.items()}


def memory() -> dict[str, float]:
    """Return the bytes of a row of 16 with its index entry, by format of the rows."""
    from psfleet.core.engine.rules.momentum import SGD
    from psfleet.core.engine.schema.table import TableSpec
    from psfleet.serving.served_table import ServedTable

    sizes = {}
    for form in ("float32", "bfloat16", "int8", "int4"):
        table = ServedTable(TableSpec("rows", "sparse", (DIM,), SGD()), form)
        for start in range(0, ROWS, 1 << 16):
            ids = np.arange(start, min(start + (1 << 16), ROWS))
            table.put(ids, np.ones((len(ids), DIM), np.float32))
        sizes[f"bytes of a row of {DIM}, {form}"] = table.bytes / len(table)
    return sizes


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--short", action="store_true", help="fewer calls and runs")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    parser.add_argument("--serve", choices=["psfleet", "starlette"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, Path(options.folder))
        return
    runs, calls_of = (3, {1: 300, 100: 100}) if options.short else (5, {1: 1000, 100: 200})
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_snapshot(folder)
        figures = embedded(folder, 3 * runs, calls_of)
        figures |= services(folder, runs, calls_of) | memory()
    for name, value in figures.items():
        print(f"{name:50} {value:10,.1f}")
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    sys.path.append(os.path.dirname(__file__))
    main()
