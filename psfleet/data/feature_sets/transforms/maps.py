"""Map and text transforms: Lookup, MapLookup, Lowercase, Split and NGrams.

Texts are handled as Python strings. A request has only a few of them, and converting these to Arrow would
take longer than the transforms themselves.
"""

import itertools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from psfleet.core.base.errors import ConfigError, UsageError
from psfleet.core.base.validation.annotations import FilePath, PositiveInt, check
from psfleet.data.feature_sets.jagged import Jagged
from psfleet.data.feature_sets.transforms.transform import Transform, plain_values, texts_or_ints
from psfleet.data.feature_sets.value_types import Dtype, as_typed

Plain = int | float | str


def _texts(bags: Jagged, owner: Transform) -> Jagged:
    return as_typed(type(owner).__name__, bags, "text")


def objects(values: Sequence[Any]) -> NDArray[Any]:
    """Return an array of Python objects. Without this, NumPy would convert numbers and lists."""
    return np.fromiter(values, object, len(values))


def places_in(index: Mapping[Any, int], keys: Iterable[Any]) -> NDArray[np.int64]:
    """Return the position of each key in an index, or -1 for a key that the index lacks, int64 [n]."""
    # `map` runs no Python code for each key, and takes half the time of a comprehension.
    return np.fromiter(map(index.get, keys, itertools.repeat(-1)), np.int64)


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


@dataclass
class Lookup(Transform):
    """Replaces each value by its entry in a map.

        Number("price", transform=Lookup({"hat": 9.5, "shoes": 60}, default=0))
        Feature("country", countries, hashed=True, transform=Lookup(file="country_of_city.json"))

    Attributes:
        map: Mapping from texts to numbers or texts. A number as key means its digits as text.
        default: Result for a value that is not in the map. None means that such a value is an error.
        file: Path of a JSON object, as an alternative to `map`.
    """

    takes = "text"
    map: Mapping[Any, Any] | None = None
    default: Plain | None = None
    file: InitVar[str | os.PathLike[str] | None] = None
    _places: dict[str, int] = field(default_factory=dict, init=False, repr=False, compare=False)
    _found: Any = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self, file: Any) -> None:
        super().__post_init__()
        if self.map is None:
            self.map = _read_map(check("Lookup", "file", file, FilePath | None))
        if not self.map:
            raise ConfigError(f"Lookup: the map is {self.map!r}; give it at least one key")
        keys = map(str, texts_or_ints("Lookup: the map", self.map))
        self.map = dict(zip(keys, plain_values(self.map.values()), strict=True))
        self._places = {key: index for index, key in enumerate(self.map)}
        # One entry more than the map has: the result for keys that are not in the map.
        values = [*self.map.values(), next(iter(self.map.values()))]
        if self.default is not None:
            values[-1] = self.default
        self._found = _plain_array("Lookup", values)

    @override
    def __call__(self, *inputs: Jagged) -> Jagged:
        keys = as_typed("Lookup", inputs[0], "text")
        texts = keys.values.tolist()
        indices = places_in(self._places, texts)
        if self.default is None and len(indices) and indices.min() < 0:
            key = texts[int(np.argmin(indices))]
            raise UsageError(
                f"Lookup: the map of {len(self._places)} keys lacks {key!r:.80}; add it, or give a default"
            )
        return keys.with_values(
            self._found[indices]
        )  # position -1, of an unknown key, is the last entry


def _read_map(file: Any) -> Any:
    if file is None:
        return None
    try:
        document = json.loads(Path(file).read_text("utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"the map {os.fspath(file)!r} cannot be read: {error}") from None
    if not isinstance(document, dict):
        raise ConfigError(f"the map {os.fspath(file)!r} has {document!r:.60}; it must be an object")
    return document


def _plain_array(owner: str, values: list[Any]) -> NDArray[Any]:
    """Return values as an array of numbers or of texts. Raises an error for a mixture."""
    if all(isinstance(value, str) for value in values):
        return objects(values)
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(
                f"{owner}: the map has the value {value!r:.60}; its values and the default must be all "
                "numbers or all texts"
            )
    return np.array(values)


@dataclass
class MapLookup(Transform):
    """Looks keys up in a map that each sample has as an input. The first input is the map, the second the
    keys.

        Input("clicks_by_category", "text")  # a list of texts: ["shoes:3", "hats:1"]
        Number("clicks_here", inputs=["clicks_by_category", "category"], transform=MapLookup(default=0))

    Attributes:
        separator: Text between key and value.
        dtype: Type of the values: "int", "float" or "text".
        default: Result for a key that is not in the sample's map. None means that such a key is an error.
    """

    arity = (2, 2)
    separator: str = ":"
    dtype: Dtype = "float"
    default: Plain | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.separator:
            raise ConfigError("MapLookup: separator is ''; it must be a text such as ':'")

    @override
    def __call__(self, *inputs: Jagged) -> Jagged:
        entries, keys = (as_typed("MapLookup", bags, "text") for bags in inputs)
        names, values = parted("MapLookup", entries, self.separator)
        typed_values = as_typed("MapLookup", Jagged(values, [len(values)]), self.dtype).values
        place_of = dict(zip(zip(entries.rows.tolist(), names, strict=True), itertools.count()))
        indices = places_in(place_of, zip(keys.rows.tolist(), keys.values.tolist(), strict=True))
        if self.default is None and len(indices) and indices.min() < 0:
            key = keys.values[int(np.argmin(indices))]
            raise UsageError(
                f"MapLookup: the map of a sample lacks the key {key!r:.80}; add it, or give a default"
            )
        default = np.array([0 if self.default is None else self.default], typed_values.dtype)
        return keys.with_values(np.concatenate([typed_values, default])[indices])


def parted(owner: str, texts: Jagged, separator: str) -> tuple[list[str], NDArray[Any]]:
    """Split each text at its last separator, and return the texts before it and the values after it.

    Raises:
        UsageError: A text has no separator.
    """
    parts = [text.rpartition(separator) for text in texts.values.tolist()]
    for before, between, value in parts:
        if not between:
            raise UsageError(
                f"{owner} has the text {before + value!r:.80}, which has no {separator!r}; write "
                f"'key{separator}value'"
            )
    return [part[0] for part in parts], objects([part[2] for part in parts])
