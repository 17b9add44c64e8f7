"""Texts that become words, characters and n-grams."""

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from psfleet.errors import ConfigError
from psfleet.feature_sets.jagged import Jagged
from psfleet.feature_sets.transforms.transform import Transform
from psfleet.feature_sets.value_types import as_typed
from psfleet.validation.annotations import PositiveInt


def _texts(bags: Jagged, owner: Transform) -> Jagged:
    return as_typed(type(owner).__name__, bags, "text")


def objects(values: list[Any]) -> NDArray[Any]:
    """An array of these objects, whatever they are."""
    array = np.empty(len(values), object)
    array[:] = values
    return array


@dataclass
class Lowercase(Transform):
    """Texts in lower case.

    Feature("query", words, hashed=True, transform=[Lowercase(), Split()])
    """

    takes = "text"

    @override
    def __call__(self, *inputs: Jagged) -> Jagged:
        texts = _texts(inputs[0], self)
        return texts.with_values(objects(list(map(str.lower, texts.values.tolist()))))


@dataclass
class Split(Transform):
    """The parts of each text, without empty ones.

        Feature("query", words, hashed=True, transform=Split())  # "red  hat" -> "red", "hat"
        Feature("genres", genres, hashed=True, transform=Split(","))  # "war,love" -> "war", "love"
        Feature("name", grams, hashed=True, transform=[Split(""), NGrams(3, separator="")])  # characters

    Attributes:
        separator: The text between parts; None: any white space; "": each character is a part.
    """

    takes = "text"
    separator: str | None = None

    @override
    def __call__(self, *inputs: Jagged) -> Jagged:
        texts, separator = _texts(inputs[0], self), self.separator
        values = texts.values.tolist()
        parts = values if separator == "" else [text.split(separator) for text in values]
        if separator:
            parts = [[part for part in words if part] for words in parts]
        counts = np.fromiter(map(len, parts), np.int64, len(parts))
        return texts.expanded(objects(list(itertools.chain.from_iterable(parts))), counts)


@dataclass
class NGrams(Transform):
    """Runs of neighbouring values of a sample, joined to one text: first the shortest ones.

        Feature("query", words, hashed=True, transform=[Split(), NGrams(1, 2)])
        # "red summer hat" -> "red", "summer", "hat", "red summer", "summer hat"

    Attributes:
        least: The least number of values of a run.
        most: The largest; None: the same.
        separator: Text between the values of a run.
    """

    takes = "text"
    least: PositiveInt
    most: PositiveInt | None = None
    separator: str = " "

    def __post_init__(self) -> None:
        super().__post_init__()
        self.most = self.least if self.most is None else self.most
        if self.most < self.least:
            raise ConfigError(
                f"NGrams: least is {self.least} and most is {self.most}; exchange them"
            )

    @override
    def __call__(self, *inputs: Jagged) -> Jagged:
        texts = _texts(inputs[0], self)
        grams, firsts = texts.values, np.arange(len(texts.values))
        remaining = (
            np.repeat(texts.offsets[1:], texts.lengths) - firsts
        )  # values up to the end of the sample
        runs, starts = [], []
        for size in range(1, (self.most or self.least) + 1):
            if size > 1:
                fits = remaining[firsts] >= size
                firsts = firsts[fits]
                grams = grams[fits] + self.separator + texts.values[firsts + size - 1]
            if size >= self.least:
                runs.append(grams)
                starts.append(firsts)
        values, places = np.concatenate(runs), np.concatenate(starts)
        rows = texts.rows[places]
        order = np.argsort(rows, kind="stable")
        weights = None if texts.weights is None else texts.weights[places[order]]
        return Jagged(values[order], np.bincount(rows, minlength=len(texts)), weights=weights)
