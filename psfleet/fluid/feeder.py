"""Feeding lists of samples."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from psfleet.errors import ShapeError
from psfleet.program.operation import Array
from psfleet.program.program import Program, default_main_program
from psfleet.program.variable import Variable

__all__ = ["DataFeeder"]


class DataFeeder:
    """Turns samples into feeds.

    Args:
        feed_list: Data variables or their names, in the order of a sample's fields.
        place: Accepted for the reference's sake.
        program: Where the names are looked up; None: the default main program.
    """

    def __init__(
        self, feed_list: Sequence[Variable | str], place: Any = None, program: Program | None = None
    ) -> None:
        program = program or default_main_program()
        self.place = place
        self.variables = [
            program.variable(entry, "feed") if isinstance(entry, str) else entry
            for entry in feed_list
        ]

    def feed(self, iterable: Iterable[Sequence[Any]]) -> dict[str, Array]:
        """A feed of a batch of samples, each a tuple with one field per variable.

        Raises:
            ShapeError: A sample has another number of fields, or a field does not fit its variable.
        """
        samples = list(iterable)
        for number, sample in enumerate(samples):
            if len(sample) != len(self.variables):
                raise ShapeError(
                    f"sample {number} has {len(sample)} fields, "
                    f"the feeder has {len(self.variables)} variables"
                )
        return {
            variable.name: _batch(variable, [sample[i] for sample in samples])
            for i, variable in enumerate(self.variables)
        }


def _batch(variable: Variable, fields: list[Any]) -> Array:
    """Fields one below the other; a flat field gets its variable's shape."""
    shape = [-1 if extent is None else extent for extent in variable.shape]
    try:
        batch = np.array(fields)
        batch = batch.reshape([len(fields), *shape[1:]]) if shape else batch
    except ValueError as error:
        raise ShapeError(
            f"feed {variable.name!r}: the fields do not make an array of shape "
            f"{variable.shape}: {error}"
        ) from None
    # Fractions stay what they are where ids are wanted: the executor refuses them.
    fits = batch.dtype.kind == variable.dtype.kind or variable.dtype.kind == "f"
    return batch.astype(variable.dtype) if fits else batch
