"""Runs of a suite, each from a seed."""

import random
from collections.abc import Callable, Iterable
from dataclasses import replace

from tests.protocol.fleet.fleet import Fleet
from tests.protocol.fleet.job import job_of
from tests.protocol.fleet.scaled_fleet import ScaledFleet
from tests.protocol.scheduler import Chances, Scheduler


def fleet(suite: str, seed: int) -> Callable[[Iterable[int]], Scheduler]:
    """What makes one run of a suite, without the faults of the numbers that it is given."""
    dice = random.Random(f"{suite}/{seed}")
    job = job_of(suite, dice)
    chances = Chances.drawn(dice, torn=dice.choice([0, 0.001, 0.01]))
    if job.moves:
        chances = replace(chances, drop=chances.drop / 3)
    if job.moves and (job.logs or job.standbys):  # training must get on between two deaths
        rare = 4 if job.logs else 16
        steps, fault, torn = 3 * chances.steps, chances.fault / rare, chances.torn / 10
        chances = replace(chances, steps=steps, fault=fault, torn=torn)
    kind = ScaledFleet if job.moves else Fleet

    def make(without: Iterable[int] = ()) -> Scheduler:
        return kind(job, chances, f"{suite}/{seed}", without)

    return make
