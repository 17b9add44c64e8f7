"""Look-up of values in a map, and texts that become words, characters and n-grams."""

import itertools
import json
import os
from collections.abc import Mapping
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


@dataclass
class Lookup(Transform):
    """The value that a map has for each value.

        Number("price", transform=Lookup({"hat": 9.5, "shoes": 60}, default=0))
        Feature("country", countries, hashed=True, transform=Lookup(file="country_of_city.json"))

    Attributes:
        map: From texts, or numbers that are taken as texts, to numbers or to texts.
        default: For a value that is not in the map; None: it is refused.
        file: In place of the map, a file with it as a JSON object.
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
        self._places = {key: place for place, key in enumerate(self.map)}
        # The last place is that of the default.
        values = [*self.map.values(), next(iter(self.map.values()))]
        if self.default is not None:
            values[-1] = self.default
        self._found = _plain_array("Lookup", values)

    @override
    def __call__(self, *inputs: Jagged) -> Jagged:
        keys = as_typed("Lookup", inputs[0], "text")
        missing = len(self._places)
        texts, find = keys.values.tolist(), self._places.get
        places = np.array([find(key, missing) for key in texts], np.intp)
        if self.default is None and len(places) and places.max() == missing:
            key = texts[int(np.argmax(places))]
            raise UsageError(
                f"Lookup: the map of {missing} keys lacks {key!r:.80}; add it, or give a default"
            )
        return keys.with_values(self._found[places])


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
    """An array of numbers, or of texts."""
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
    """The values that the map of a sample has for keys of the same sample.

        Input("clicks_by_category", "text")  # a list of texts: ["shoes:3", "hats:1"]
        Number("clicks_here", inputs=["clicks_by_category", "category"], transform=MapLookup(default=0))

    Attributes:
        separator: Text between key and value.
        dtype: Type of the values: "int", "float" or "text".
        default: For a key that is not in the sample's map; None: it is refused.
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
        entries, keys = (as_typed("MapLookup", each, "text") for each in inputs)
        names, values = parted("MapLookup", entries, self.separator)
        typed_values = as_typed("MapLookup", Jagged(values, [len(values)]), self.dtype).values
        place_of = dict(
            zip(zip(entries.rows.tolist(), names, strict=True), range(len(names)), strict=True)
        )
        pairs = zip(keys.rows.tolist(), keys.values.tolist(), strict=True)
        places = np.array([place_of.get(each, -1) for each in pairs], np.intp)
        if self.default is None and len(places) and places.min() < 0:
            key = keys.values[int(np.argmin(places))]
            raise UsageError(
                f"MapLookup: the map of a sample lacks the key {key!r:.80}; add it, or give a default"
            )
        default = np.array([0 if self.default is None else self.default], typed_values.dtype)
        return keys.with_values(np.concatenate([typed_values, default])[places])


def parted(owner: str, texts: Jagged, separator: str) -> tuple[list[str], NDArray[Any]]:
    """The parts of texts before and behind the last separator in each.

    Raises:
        UsageError: A text has none.
    """
    parts = [text.rpartition(separator) for text in texts.values.tolist()]
    for before, between, value in parts:
        if not between:
            raise UsageError(
                f"{owner} has the text {before + value!r:.80}, which has no {separator!r}; write "
                f"'key{separator}value'"
            )
    return [part[0] for part in parts], objects([part[2] for part in parts])
