"""What launchers, agents, workers and servers need, imported once for all that are forked (starter.py)."""

import gc
import importlib
import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from psfleet.core.engine.rules import Rule

_LAUNCHED = ("psfleet_launch.commands.launch_command", "psfleet_launch.agent.agent")
_COMMANDS = tuple(
    f"psfleet_launch.commands.{name}_commands" for name in ("checkpoint", "job", "machine", "model")
)
_ENGINES = tuple(f"psfleet_launch.engines.{name}" for name in ("join", "ssh", "slurm", "ray"))
_TRAINED = ("psfleet_worker.cluster_runtime", "psfleet_worker.stage_links", "psfleet.core.client")
_USED = (
    "prometheus_client",
    "psfleet.fleet",
    "psfleet.layers",
    "psfleet.optimizer",
    "pytest",
    "encodings.ascii",
    "encodings.idna",
)
_GRPC = (
    "grpc.experimental",
    "grpc._channel",
    "grpc._server",
    "grpc._interceptor",
    "grpc._utilities",
)
_TLS = ("cryptography.hazmat.backends.openssl.backend", "psfleet.core.net.connections.certificates")


def load(more: str) -> None:
    """Import it, and load the kernels of most tables. more: One more module."""
    for name in (*_LAUNCHED, *_COMMANDS, *_ENGINES, *_TRAINED, *_USED, *_GRPC, *_TLS, more):
        importlib.import_module(name)
    importlib.import_module("psfleet_server.process").warm_up()
    _load_kernels()
    gc.collect()
    gc.freeze()


def _load_kernels() -> None:
    """Load the kernels of most tables, which cost a process 10 to 100 ms each, and compile them first where
    nobody has: by two processes, and forks of a process that has compiled compile others in half the time."""
    from psfleet.core.engine.kernels.cache import cache_folder, load_in_any_order

    loads = _loads()
    if any(cache_folder().glob("*.lock")):
        load_in_any_order(*loads)
    elif (other := os.fork()) == 0:
        load_in_any_order(*reversed(loads))
        os._exit(0)
    else:
        load_in_any_order(*loads)
        os.waitpid(other, 0)


def _loads() -> list[Callable[[], object]]:
    """Functions that use the kernels of one table each."""
    from psfleet.core.engine.kernels.generate import static_kernels
    from psfleet.core.engine.rules import SGD, Adagrad, Adam, Ftrl

    words = ("plain_call", "arrays summed", "row_weights draw", "row_weights fill")
    dims = ((SGD(), 1), (SGD(), 3), (Adam(), 4), (Adam(), 8), (Adagrad(), 5))
    return [
        *(partial(static_kernels, *each.split()) for each in words),
        *(partial(_use_rows, rule, dim) for rule, dim in dims),
        *(partial(_use_dense, rule) for rule in (SGD(), Adam(), Ftrl())),
    ]


def _use_rows(rule: "Rule", dim: int) -> None:
    from psfleet.core.engine.kernels.dedup import merge_pushes
    from psfleet.core.engine.schema.table import InitializerSpec, TableSpec
    from psfleet.core.engine.tables.sparse import SparseTable

    ids, drawn = np.arange(3), InitializerSpec("uniform", -0.1, 0.1)
    rows, values = np.empty((3, dim), np.float32), np.ones((3, dim), np.float32)
    table = SparseTable(TableSpec("rows", "sparse", (dim,), rule, initializer=drawn))
    table.push(ids, values, 0.1)
    table.pull_into(ids, rows)
    merge_pushes([(ids, values), (ids, values)], 0.5)
    table.remove(ids[:2])
    frozen = table.freeze()
    assert sum(len(page["ids"]) for page in frozen.pages()) == 1
    frozen.close()


def _use_dense(rule: "Rule") -> None:
    from psfleet.core.engine.schema.table import TableSpec
    from psfleet.core.engine.tables.dense import DenseTable

    values = np.ones(3, np.float32)
    DenseTable(TableSpec("w", "dense", (3,), rule), values).push(values, 0.1)
