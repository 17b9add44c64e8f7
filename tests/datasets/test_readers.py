"""Readers of users' files: what they understand, and what they say about what they do not."""

from pathlib import Path

import numpy as np
import pytest

from psfleet.core.base.errors import UsageError
from psfleet.data import read_libsvm, read_ratings


def file(folder: Path, name: str, text: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_ratings(tmp_path: Path) -> None:
    """Columns are found by name; a byte order mark, quotes, spaces and empty lines do no harm."""
    path = file(
        tmp_path,
        "ratings.csv",
        '\ufeffmovieId,"userId",rating,timestamp\r\n31,1,2.5,1260759144\r\n\r\n 32 ,"2", 4,x\r\n',
    )
    ratings = read_ratings(path)
    assert ratings.users.tolist() == [1, 2]
    assert ratings.items.tolist() == [31, 32]
    assert ratings.values.tolist() == [2.5, 4.0]
    assert ratings.values.dtype == np.float32


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "userId,movieId,rating\n" + "1,2,3\n" * 15 + "1,2,x\n",
            r"ratings.csv line 17: rating 'x' is not a finite number",
        ),
        ("userId,movieId,rating\n1,2,nan\n", "line 2: rating 'nan' is not a finite number"),
        ("userId,movieId,rating\n1.5,2,3\n", "line 2: userId '1.5' is not a whole number"),
        (
            "userId,movieId,rating\n1,99999999999999999999,3\n",
            "line 2: movieId '9{20}' is not a whole number from",
        ),
        ("userId,movieId,rating\n1,2,3\n1,2\n", r"line 3: has 2 field\(s\), the header has 3"),
        ('userId,movieId,rating\n1,"2,3\n', "line 2: is no CSV"),
        (
            "user,movieId,rating\n1,2,3\n",
            "line 1: the header 'user,movieId,rating' has no column 'userId'",
        ),
        ("userId,movieId,rating\n", "has no rating"),
        ("", "has no rating"),
        (
            b"userId,movieId,rating\n1,2,\xff\n",
            "ratings.csv is not UTF-8: .* byte 0xff in position 26",
        ),
        ("userId,movieId,rating\n1_0,2,3\n", "line 2: userId '1_0' is not a whole number"),
        ("userId,movieId,rating\n1,2,\u0664\n", "line 2: rating '\u0664' is not a finite number"),
        (b"userId,movieId,rating\n1,2,\x00\n", "line 2"),
    ],
)
def test_what_is_no_rating(tmp_path: Path, text: str | bytes, words: str) -> None:
    """One sentence with file, line and what is there."""
    with pytest.raises(UsageError, match=words) as error:
        read_ratings(file(tmp_path, "ratings.csv", text))
    assert "\n" not in str(error.value)


def test_samples(tmp_path: Path) -> None:
    """Samples of different lengths, comments and empty lines; shorter ones are filled up."""
    samples = read_libsvm(
        file(tmp_path, "a.libsvm", "# head\n5 0:1 944:0.5\n\n-1 # none\n+2.5 7:-1e2\n")
    )
    assert samples.labels.tolist() == [5, -1, 2.5]
    assert samples.starts.tolist() == [0, 2, 2, 3]
    ids, values = samples.padded()
    assert ids.tolist() == [[0, 944], [-1, -1], [7, -1]]
    assert values.tolist() == [[1, 0.5], [0, 0], [-100, 0]]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1 0:1\nlate 0:1\n", "a.libsvm line 2: label 'late' is not a finite number"),
        ("1 0:1\n1 7\n", "line 2: feature '7' is not index:value"),
        ("1 a:1\n", "line 1: index 'a' is not a whole number"),
        ("1 -3:1\n", "line 1: index -3 is negative"),
        ("1 3:\n", "line 1: value of index 3 '' is not a finite number"),
        ("1 3:1_0\n", "line 1: value of index 3 '1_0' is not a finite number"),
        ("1 3:inf\n", "line 1: value of index 3 'inf' is not a finite number"),
        ("1 3:1 4:1 3:2\n", "line 1: index 3 comes twice"),
        ("\n# nothing\n", "has no sample"),
    ],
)
def test_what_is_no_sample(tmp_path: Path, text: str, words: str) -> None:
    """One sentence with file, line and what is there."""
    with pytest.raises(UsageError, match=words):
        read_libsvm(file(tmp_path, "a.libsvm", text))


@pytest.mark.parametrize("reader", [read_ratings, read_libsvm])
def test_missing_files(tmp_path: Path, reader: object) -> None:
    """The sentence names the file."""
    with pytest.raises(UsageError, match="nowhere cannot be read: No such file"):
        reader(tmp_path / "nowhere")  # type: ignore[operator]
