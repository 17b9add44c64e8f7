"""Changed requests one after the other, and what they may not do: the promise of tests.fuzz.frames."""

import math
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import grpc

from psfleet.core.net.v1 import shard_pb2
from tests.fuzz.frames import SLOW, Broken, Ground


@dataclass
class Tally:
    """What has been tried."""

    frames: int = 0
    refused: int = 0
    waiting_calls: int = 0
    slowest: float = 0.0
    slow: str = ""
    grounds: int = 0
    methods: set[str] = field(default_factory=set)

    def __str__(self) -> str:
        return (
            f"{self.frames:,} frames to {len(self.methods)} methods of {self.grounds} servers: "
            f"{self.refused:,} refused, {self.waiting_calls:,} left waiting, "
            f"slowest {self.slowest * 1000:.0f} ms of processor time ({self.slow})"
        )


def attack(ground: Ground, dice: random.Random, tally: Tally, before: Any) -> Any:
    """One changed request; returns the state if it is as before, None if it may have changed.

    Raises:
        Broken: See the top of tests.fuzz.frames.
    """
    method, request = ground.changed(dice)
    began = time.thread_time()
    try:
        code, text, replies = ground.send(method, request)
    except Exception as error:
        raise Broken(f"{method} with {request!r} raised {error!r}") from error
    taken = time.thread_time() - began
    tally.frames += 1
    tally.methods.add(method)
    if taken > tally.slowest:
        tally.slowest, tally.slow = taken, f"{method} with {request[:120]!r}"
    if taken > SLOW:
        raise Broken(f"{method} with {request[:300]!r} took {taken:.1f} s")
    if code is None:
        tally.waiting_calls += not replies
        if method == "Shard/CreateTable":
            _check_numbers(shard_pb2.CreateTableRequest.FromString(request).spec)
        return None
    tally.refused += 1
    if "see its log" in text or "\n" in text or code is grpc.StatusCode.INTERNAL:
        raise Broken(f"{method} with {request!r} found a bug: {text}")
    if before is not None and ground.state() != before:
        raise Broken(f"{method} with {request!r} was refused ({text}) and changed the state")
    return before


def _check_numbers(spec: Any) -> None:
    """A definition that was taken holds no number that is none."""
    numbers = [*spec.hyperparameters.values(), *spec.entry_values.values()]
    numbers += [spec.l1, spec.l2, spec.low, spec.high]
    if not all(map(math.isfinite, numbers)):
        raise Broken(f"a table with the numbers {numbers} was made")


def fuzz(count: int, seed: int, folder: Path, per_ground: int = 1500) -> Tally:
    """Send `count` changed requests; the working folder must be `folder`, with one named checkpoint."""
    assert Path.cwd() == folder
    tally = Tally()
    while tally.frames < count:
        dice = random.Random(f"{seed}/{tally.grounds}")
        ground = Ground(cast("Any", (shard_pb2.MODE_SYNC, shard_pb2.MODE_ASYNC))[tally.grounds % 2])
        tally.grounds += 1
        try:
            before = ground.state()
            for _ in range(min(per_ground, count - tally.frames)):
                before = attack(ground, dice, tally, before or ground.state())
            ground.shard.validate()
        finally:
            ground.close()
    return tally
