"""Text transforms: Lowercase, Split and NGrams.

Texts are handled as Python strings. A request has only a few of them, and converting these to Arrow would
take longer than the transforms themselves.
"""

import itertools
from dataclasses import dataclass

import numpy as np
from typing_extensions import override

from psfleet.core.base.errors import ConfigError
from psfleet.core.base.validation.annotations import PositiveInt
from psfleet.data.feature_sets.jagged import Jagged
from psfleet.data.feature_sets.transforms.transform import Transform, objects
from psfleet.data.feature_sets.value_types import as_typed


def _texts(bags: Jagged, owner: Transform) -> Jagged:
    return as_typed(type(owner).__name__, bags, "text")


@dataclass
class Lowercase(Transform):
    """Converts texts to lower case, as Python's `str.lower` does.

        Feature("query", words, hashed=True, transform=[Lowercase(), Split()])

    The feature's values are read as texts.
    """

    takes = "text"

    @override
    def __call__(self, *inputs: Jagged) -> Jagged:
        texts = _texts(inputs[0], self)
        return texts.with_values(objects(list(map(str.lower, texts.values.tolist()))))


@dataclass
class Split(Transform):
    """Splits each text at a separator. Empty parts are left out.

        Feature("query", words, hashed=True, transform=Split())  # "red  hat" -> "red", "hat"
        Feature("genres", genres, hashed=True, transform=Split(","))  # "war,love" -> "war", "love"
        Feature("name", grams, hashed=True, transform=[Split(""), NGrams(3, separator="")])  # characters

    Attributes:
        separator: Text between parts. None splits at white space, and "" makes each character a part.
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
    """Joins neighbouring values of a sample to texts (n-grams). The shortest n-grams come first.

        Feature("query", words, hashed=True, transform=[Split(), NGrams(1, 2)])
        # "red summer hat" -> "red", "summer", "hat", "red summer", "summer hat"

    Attributes:
        least: Number of values in the shortest n-grams.
        most: Number of values in the longest n-grams. None means the same as `least`.
        separator: Text between the values of an n-gram.
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
        values, first_words = np.concatenate(runs), np.concatenate(starts)
        rows = texts.rows[first_words]
        order = np.argsort(rows, kind="stable")
        weights = None if texts.weights is None else texts.weights[first_words[order]]
        return Jagged(values[order], np.bincount(rows, minlength=len(texts)), weights=weights)
