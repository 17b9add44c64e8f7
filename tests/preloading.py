"""What launchers, agents, workers and servers need, imported once for all that are forked (starter.py)."""

import gc
import importlib

import numpy as np

_LAUNCHED = ("psfleet_launch.commands.launch_command", "psfleet_launch.agent.agent")
_COMMANDS = tuple(
    f"psfleet_launch.commands.{name}_commands" for name in ("checkpoint", "job", "machine", "model")
)
_ENGINES = tuple(f"psfleet_launch.engines.{name}" for name in ("join", "ssh", "slurm", "ray"))
_TRAINED = ("psfleet_worker.cluster_runtime", "psfleet_worker.stage_links", "psfleet.core.client")
_USED = ("psfleet.fleet", "psfleet.layers", "psfleet.optimizer", "pytest", "encodings.idna")
_GRPC = ("grpc.experimental", "grpc._server", "grpc._interceptor", "grpc._utilities")
_TLS = ("cryptography.hazmat.backends.openssl.backend", "cryptography.x509")


def load(more: str) -> None:
    """Import it, and load the kernels of most tables. more: One more module."""
    for name in (*_LAUNCHED, *_COMMANDS, *_ENGINES, *_TRAINED, *_USED, *_GRPC, *_TLS, more):
        importlib.import_module(name)
    importlib.import_module("psfleet_server.process").warm_up()
    _load_kernels()
    gc.collect()
    gc.freeze()


def _load_kernels() -> None:
    """Do what a server does with a table; most tables are updated by one of these rules."""
    from psfleet.core.engine.rules import SGD, Adagrad, Adam
    from psfleet.core.engine.schema.table import TableSpec
    from psfleet.core.engine.tables.sparse import SparseTable

    for rule in (SGD(), Adam(), Adagrad()):
        rows = SparseTable(TableSpec("rows", "sparse", (5,), rule))
        rows.push(np.arange(3), np.ones((3, 5), np.float32), 0.1)
    rows.remove(np.arange(2))
    frozen = rows.freeze()
    assert sum(len(page["ids"]) for page in frozen.pages()) == 1
    frozen.close()
