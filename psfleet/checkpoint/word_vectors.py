"""Reading of word vectors in the text format of word2vec and GloVe, for imports (`imported_rows.py`).

    400000 100                         optional: number of words and number of weights
    the -0.038 -0.244 ...              a word, a blank or tab, and its weights
    . . . 0.1 0.2 ...                  words of GloVe may have blanks: the numbers at the end are the weights

The whole file is read into memory. An error message names the line.
"""

import itertools
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import CheckpointError

_COUNTS = re.compile(r"([0-9]{1,18})[ \t]([0-9]{1,18})")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+|nan|inf)(e[+-]?[0-9]+)?", re.IGNORECASE)


def word_rows(path: str) -> tuple[list[str], NDArray[np.float32]]:
    """Read the words of a file, and their weights as float32 [n, dim].

    Raises:
        CheckpointError: A line is no word with weights, or the file is empty. The message names the line.
    """
    words: list[str] = []
    rows: list[NDArray[np.float32]] = []
    # Words of GloVe have characters that Python would take for the end of a line without `newline`.
    with Path(path).open(encoding="utf-8-sig", newline="\n") as file:
        stripped = ((number, line.rstrip("\r\n\t ")) for number, line in enumerate(file, 1))
        lines = ((number, line) for number, line in stripped if line)
        head = [*itertools.islice(lines, 2)]
        count = _count(head)
        for number, line in itertools.chain(head[count is not None :], lines):
            try:
                word, row = _word(line, len(rows[0]) if rows else None)
            except ValueError as error:
                raise CheckpointError(f"{path!r} line {number}: {error}") from None
            words.append(word)
            rows.append(row)
    if count not in (None, len(rows)):
        raise CheckpointError(
            f"{path!r} begins with the line {head[0][1]!r}, and {len(rows)} words follow; correct the number "
            f"of words, or write {head[0][1]}.0 if it is a word and its weight"
        )
    if not rows:
        raise CheckpointError(f"{path!r} has no words")
    return words, np.stack(rows)


def _count(head: Sequence[tuple[int, str]]) -> int | None:
    """Return the number of words if the first line gives it, or None if the first line is a word with
    weights.
    """
    match = _COUNTS.fullmatch(head[0][1]) if head else None
    if match is None or (len(head) > 1 and len(_split(head[1][1])[1]) != int(match[2])):
        return None
    return int(match[1])


def _word(line: str, width: int | None) -> tuple[str, NDArray[np.float32]]:
    """Return the word of a line and its weights, float32 [width].

    Args:
        line: The line without its line end.
        width: Number of weights in the lines before, or None for the first line.

    Raises:
        ValueError: The line has no word or no weights, another number of weights than the lines before, or
            a weight that is no number.
    """
    word, *numbers = line.split(" ")
    if len(numbers) != width or "\t" in line:
        word, numbers = _split(line)
    if not word or not numbers:
        raise ValueError(
            f"{line!r:.60} must be a word, a blank or tab, and numbers with blanks or tabs"
        )
    if width not in (None, len(numbers)):
        raise ValueError(f"{word!r:.60} has {len(numbers)} numbers, the words before it {width}")
    for number in numbers:
        # NumPy converts all numbers of a line in a third of the time that `real_number` takes for them. But
        # it also accepts underscores and digits that are not ASCII, which are no numbers here.
        if "_" in number or not number.isascii():
            raise ValueError(f"{number!r:.60} is no number")
    with np.errstate(over="ignore"):
        return word, np.array(numbers, np.float32)


def _split(line: str) -> tuple[str, list[str]]:
    """Split a line into its word and the texts of its numbers.

    The word ends at the first tab. Without a tab, it ends before the numbers at the end of the line.
    """
    word, tab, number_text = line.partition("\t")
    if tab:
        return word, number_text.split()
    fields = line.split(" ")
    start = len(fields)
    while start > 1 and _NUMBER.fullmatch(fields[start - 1]):
        start -= 1
    return " ".join(fields[:start]), fields[start:]
