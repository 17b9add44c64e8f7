"""Chooses the peers, other frameworks' parameter servers, that take part in a benchmark beside psfleet."""

import argparse
import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from peers.environments import unmade
from peers.paddle_group import paddle_crew
from peers.tensorflow_group import tensorflow_crew
from peers.torch_group import torch_crew
from processes import Crew
from reporting import Report, torch_missing

__all__ = ["Peer", "absence", "enter", "paddle", "tensorflow", "torch"]


@dataclass(frozen=True)
class Peer:
    """Other framework that takes part in a benchmark if it is installed.

    Attributes:
        name: Name in tables.
        kind: Framework: torch, tensorflow or paddle.
        crew: Starts its processes, as a context manager. The argument is the name in tables.
    """

    name: str
    kind: str
    crew: Callable[[str], AbstractContextManager[Crew]]


def torch(workload: str, workers: int, *, over_tcp: bool = False) -> Peer:
    """Return torch.distributed.rpc with a workload.

    Args:
        workload: w1, w2-sgd, w2-adam, w3 or w3-bf16.
        workers: Number of workers.
        over_tcp: True to send tensors over TCP, as between hosts. Otherwise a process reads them from the
            memory of the other process.
    """
    return Peer(
        "torch rpc over TCP" if over_tcp else "torch rpc",
        "torch",
        lambda name: torch_crew(name, workload, workers, over_tcp=over_tcp),
    )


def tensorflow(workload: str, workers: int, rule: str) -> Peer:
    """Return TensorFlow's ParameterServerStrategy with a workload and a rule.

    Args:
        workload: w1, w2 or w3.
        workers: Number of workers.
        rule: sgd, adagrad or adam.
    """
    return Peer(
        f"TensorFlow, {rule}",
        "tensorflow",
        lambda name: tensorflow_crew(name, workload, workers, rule),
    )


def paddle(workload: str, workers: int, rule: str, rows: int = 0) -> Peer:
    """Return Paddle's parameter servers with a workload and a rule.

    Args:
        workload: w1, w2 or w3.
        workers: Number of workers.
        rule: sgd or adam.
        rows: Number of rows that the table of W1 has at the start.
    """
    return Peer(
        f"Paddle, {rule}", "paddle", lambda name: paddle_crew(name, workload, workers, rule, rows)
    )


def absence(kind: str, options: argparse.Namespace) -> str | None:
    """Return the reason for which a framework does not take part, or None if it does."""
    if options.no_peers:
        return "left out"
    if kind == "torch":
        return torch_missing()
    return unmade(kind) if options.all_peers else "left out; --all-peers asks for it"


def enter(
    stack: contextlib.ExitStack, report: Report, options: argparse.Namespace, peers: list[Peer]
) -> list[Crew]:
    """Start the peers that take part, and list the other peers in the report as skipped."""
    crews = []
    for peer in peers:
        if reason := absence(peer.kind, options):
            report.skipped[peer.name] = reason
        else:
            crews.append(stack.enter_context(peer.crew(peer.name)))
    return crews
