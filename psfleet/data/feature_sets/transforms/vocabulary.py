"""Vocabulary: numbers the values of a list.

`fit` counts the values of a vocabulary exactly, in memory. The first call of a Vocabulary builds an index
of its values.
"""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from psfleet.core.base.errors import ConfigError, UsageError
from psfleet.core.base.validation.annotations import FilePath, NonNegativeInt, PositiveInt, check
from psfleet.data.feature_sets.jagged import Jagged
from psfleet.data.feature_sets.transforms.maps import places_in
from psfleet.data.feature_sets.transforms.transform import FittedTransform, objects, texts_or_ints
from psfleet.data.feature_sets.value_types import hashed, typed


@dataclass
class Vocabulary(FittedTransform):
    """Replaces each value by its number in a list of known values. All other values are out of vocabulary
    (OOV).

        Feature("city", cities, transform=Vocabulary(["Rome", "Oslo"]))  # "Rome" -> 1, others -> 0
        Feature("city", cities, transform=Vocabulary(file="cities.txt"))  # a value on each line
        Feature("city", cities, transform=Vocabulary(min_count=5))  # `fit` counts the values of the data

    The first `oov` ids are for other values, and the ids of the list follow. Values are texts. For numbers,
    give the feature dtype="int", which is faster.

    Attributes:
        values: The list. None means that `fit` makes it from exact counts, with frequent values first.
            Values with equal counts are sorted as texts.
        min_count: Minimum count of a value that `fit` puts into the list.
        max_size: Maximum number of values that `fit` puts into the list. 0 means no limit.
        oov: Number of ids for values that are not in the list. A hash chooses one of the ids 0 to oov - 1.
            With 0, such values are left out.
    """

    takes = "text"
    values: Sequence[Any] | None = None
    min_count: PositiveInt = 1
    max_size: NonNegativeInt = 0
    oov: NonNegativeInt = 1
    file: InitVar[str | os.PathLike[str] | None] = None
    _counts: Counter[Any] = field(default_factory=Counter, init=False, repr=False, compare=False)
    _index: Any = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self, file: Any) -> None:
        super().__post_init__()
        check("Vocabulary", "file", file, FilePath | None)
        if file is not None and self.values is None:
            self.values = _lines(file)
        if self.values is None:
            return
        self.values = texts_or_ints("Vocabulary: the list of values", self.values)
        where = f" of {os.fspath(file)!r}" if file is not None else ""
        if not self.values:
            raise ConfigError(f"Vocabulary: the list of values{where} is empty; give at least one")
        for value, count in Counter(map(str, self.values)).items():
            if count > 1:
                raise ConfigError(
                    f"Vocabulary: the value {value!r:.80} is there {count} times{where}; name it once"
                )

    @property
    def size(self) -> int:
        """Number of ids, including those for values out of vocabulary."""
        self.check_fitted()
        return self.oov + len(self.values or ())

    @property
    @override
    def fitted(self) -> bool:
        return self.values is not None

    @override
    def observe(self, *inputs: Jagged) -> None:
        self._counts.update(_texts_or_ints(inputs[0]).tolist())

    @override
    def finish(self) -> None:
        items = [item for item in self._counts.items() if item[1] >= self.min_count]
        if not items:
            raise UsageError(
                f"Vocabulary: no value comes {self.min_count} times in {self._counts.total()} values; lower "
                "min_count, or fit it with more data"
            )
        items.sort(key=lambda item: (-item[1], str(item[0])))
        self.values = [value for value, _ in items[: self.max_size or None]]
        self._counts.clear()

    @override
    def __call__(self, *inputs: Jagged) -> Jagged:
        self.check_fitted()
        values = _texts_or_ints(inputs[0])
        indices = self._places(values)
        unknown = indices < 0
        ids = indices + self.oov
        if not unknown.any():
            return inputs[0].with_values(ids)
        if not self.oov:
            return inputs[0].with_values(ids).kept(~unknown)
        ids[unknown] = 0
        if self.oov > 1:
            ids[unknown] = hashed(values[unknown], self.oov)
        return inputs[0].with_values(ids)

    def _places(self, values: NDArray[Any]) -> NDArray[np.int64]:
        """Return the position of each value in the list, or -1 for a value that is not in the list."""
        if self._index is None:
            self._index = _Index(self.values or ())
        if values.dtype.kind in "iu":
            numbers, order = self._index.numbers
            if not len(numbers):
                return np.full(len(values), -1)
            at = np.minimum(np.searchsorted(numbers, values), len(numbers) - 1)
            return np.where(numbers[at] == values, order[at], -1)
        return places_in(self._index.texts, values.tolist())


def _texts_or_ints(bags: Jagged) -> NDArray[Any]:
    if bags.values.dtype.kind == "f" and len(bags.values):
        raise UsageError(
            f"Vocabulary has the value {bags.values[0]}, and takes texts or whole numbers; declare "
            "dtype='int' or 'text', or put Bucketize before it"
        )
    return bags.values


class _Index:
    """Index of a vocabulary's values, by text and by number."""

    def __init__(self, values: Sequence[Any]) -> None:
        self.texts = {str(value): index for index, value in enumerate(values)}
        numbers, missing, bad = typed(objects(list(values)), "int")
        usable = np.flatnonzero(~(missing | bad))
        order = usable[np.argsort(numbers[usable], kind="stable")]
        self.numbers = numbers[order], order


def _lines(file: str | os.PathLike[str]) -> list[str]:
    try:
        # Split at line feeds only, because values may contain other line ends of Python, such as U+2028.
        lines = Path(file).read_bytes().decode("utf-8-sig").split("\n")
        return [value for line in lines if (value := line.removesuffix("\r"))]
    except (OSError, UnicodeDecodeError) as error:
        cause = getattr(error, "strerror", None) or error
        raise ConfigError(f"the vocabulary {os.fspath(file)!r} cannot be read: {cause}") from None
