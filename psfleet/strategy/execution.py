"""How a program is run: in pieces on stages, and with activations computed again."""

import re
from dataclasses import dataclass

from psfleet.errors import ConfigError
from psfleet.settings.choices import Schedule
from psfleet.settings.declaration import check, setting

__all__ = ["PipelineSettings", "RecomputeSettings"]


@dataclass(frozen=True)
class PipelineSettings:
    """The program is cut into pieces that stages run on micro-batches.

    A script that runs by itself is cut in the same places and runs the pieces in turn.
    """

    schedule: Schedule = setting(
        "1f1b", "Run the program in pieces on micro-batches, in this order", names="--pipeline"
    )
    stages: int = setting(
        1, "Processes of each worker; each runs its pieces", names="--stages", least=1
    )
    micro_batches: int = setting(
        1, "Parts that each batch is cut into", names="--micro-batches", least=1
    )
    chunks: int = setting(
        0, "Pieces of each stage; 0: 2 where the schedule is interleaved, else 1", least=0
    )
    queue_size: int = setting(
        30, "Messages to a stage that may wait before the sender does", least=1
    )
    copies: tuple[int, ...] = setting(
        (), "Processes of each stage, which take micro-batches in turn; empty: one each"
    )

    def __post_init__(self) -> None:
        check(self, lambda one: f"pipeline {one.name}")
        if self.copies and (len(self.copies) != self.stages or min(self.copies) < 1):
            raise ConfigError(
                f"pipeline copies is {self.copies}; it must name at least 1 for each of "
                f"{self.stages} stages"
            )
        if self.chunks > 1 and self.schedule == "zero-bubble":
            raise ConfigError(
                f"pipeline schedule zero-bubble and chunks = {self.chunks} contradict "
                "each other: it works with 1; use interleaved"
            )

    @property
    def per_stage(self) -> int:
        """Pieces of each stage."""
        return self.chunks or (2 if self.schedule == "interleaved" else 1)


@dataclass(frozen=True)
class RecomputeSettings:
    """Activations between checkpoints are dropped and computed again in the backward pass."""

    checkpoints: tuple[str, ...] = setting(
        (), "Names of variables or layers; empty: the first run chooses"
    )
    memory_budget: str = setting(
        "",
        'What the choice keeps within, such as "512MiB" or "2GB"; empty: what cutting at every '
        "sqrt(n)-th operation takes",
    )

    def __post_init__(self) -> None:
        if self.checkpoints and self.memory_budget:
            raise ConfigError(
                "recompute has checkpoints and a memory_budget; the budget is for "
                "choosing checkpoints: leave one out"
            )
        self.budget  # noqa: B018  # refuses what is no size

    @property
    def budget(self) -> int | None:
        """memory_budget in bytes."""
        if not self.memory_budget:
            return None
        number, unit = re.fullmatch(r"([0-9.]*)\s*(.*)", self.memory_budget.strip()).groups()  # type: ignore[union-attr]  # matches anything
        factor = _UNITS.get(unit)
        if factor is None or not re.fullmatch(r"\d+(\.\d+)?", number):
            raise ConfigError(
                f"recompute memory_budget is {self.memory_budget!r}; it must be a number "
                f"and one of {', '.join(filter(None, _UNITS))}"
            )
        return int(float(number) * factor)


_UNITS = {
    "": 1,
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
}
