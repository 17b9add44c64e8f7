"""Which unknown ids of a push get a row. Those that get none leave no trace in the table."""

from dataclasses import dataclass

from psfleet.errors import ConfigError

__all__ = ["Entry", "ProbabilityEntry", "make_entry"]


@dataclass(frozen=True, slots=True)
class ProbabilityEntry:
    """Each push that names an id without a row gives it one with this probability.

    The draw is a hash of id, table, seed and the table's step: the same on any number of servers,
    and once more after a restart.

    Attributes:
        probability: In (0, 1].
    """

    probability: float

    def __post_init__(self) -> None:
        if not 0 < self.probability <= 1:
            raise ConfigError(
                f"the probability of an entry is {self.probability}; "
                "it must be above 0 and at most 1"
            )

    @property
    def kind(self) -> str:
        """Its name in messages and checkpoints."""
        return "probability"

    def values(self) -> dict[str, float]:
        """What `make_entry` needs beside the kind."""
        return {"probability": self.probability}


Entry = ProbabilityEntry


def make_entry(kind: str, values: dict[str, float]) -> Entry | None:
    """The entry of that kind; None for the kind ''.

    Raises:
        ConfigError: The kind is unknown or the values are not its own.
    """
    if not kind:
        return None
    if kind != "probability" or set(values) != {"probability"}:
        raise ConfigError(
            f"entry {kind!r} with {sorted(values)} is unknown; use probability with ['probability']"
        )
    return ProbabilityEntry(values["probability"])
