"""Who takes part besides psfleet, and who is skipped for which reason."""

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
    """A contender that may be absent.

    Attributes:
        name: In tables.
        kind: torch, tensorflow or paddle.
        crew: Starts it under that name.
    """

    name: str
    kind: str
    crew: Callable[[str], AbstractContextManager[Crew]]


def torch(workload: str, workers: int, *, over_tcp: bool = False) -> Peer:
    """torch.distributed.rpc: w1, w2-sgd, w2-adam, w3 or w3-bf16.

    over_tcp: Tensors travel as between hosts; else it reads them out of the other process's memory.
    """
    return Peer(
        "torch rpc over TCP" if over_tcp else "torch rpc",
        "torch",
        lambda name: torch_crew(name, workload, workers, over_tcp=over_tcp),
    )


def tensorflow(workload: str, workers: int, rule: str) -> Peer:
    """TensorFlow's ParameterServerStrategy: w1, w2 or w3 under sgd, adagrad or adam."""
    return Peer(
        f"TensorFlow, {rule}",
        "tensorflow",
        lambda name: tensorflow_crew(name, workload, workers, rule),
    )


def paddle(workload: str, workers: int, rule: str, rows: int = 0) -> Peer:
    """Paddle's parameter servers: w1, w2 or w3 under sgd or adam."""
    return Peer(
        f"Paddle, {rule}", "paddle", lambda name: paddle_crew(name, workload, workers, rule, rows)
    )


def absence(kind: str, options: argparse.Namespace) -> str | None:
    """Why a kind of peer does not take part, or None."""
    if options.no_peers:
        return "left out"
    if kind == "torch":
        return torch_missing()
    return unmade(kind) if options.all_peers else "left out; --all-peers asks for it"


def enter(
    stack: contextlib.ExitStack, report: Report, options: argparse.Namespace, peers: list[Peer]
) -> list[Crew]:
    """Start the peers that are here; the others are named as skipped."""
    crews = []
    for peer in peers:
        if reason := absence(peer.kind, options):
            report.skipped[peer.name] = reason
        else:
            crews.append(stack.enter_context(peer.crew(peer.name)))
    return crews
