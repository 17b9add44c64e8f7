"""Judges values by their declared type, and hashes them to ids.

`typed` decides for every file, request and batch what a value such as "007", NaN or 7.0 stands for;
tests/feature_sets/test_routes.py is its specification. Whole columns are judged at once if they can be, and
value by value if not.
"""

import contextlib
import hashlib
import math
import re
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from psfleet.core.base.errors import IdError
from psfleet.core.base.validation.annotations import NonNegativeInt, checked
from psfleet.core.engine.gradient_checks import exact_below
from psfleet.core.engine.kernels.hashing import hash_ids
from psfleet.core.engine.kernels.text_hashing import text_numbers, utf8_numbers
from psfleet.data.feature_sets.jagged import Jagged, as_plain

Ids = NDArray[np.int64]

_WHOLE = re.compile(
    "0|-?[1-9][0-9]{0,19}"
)  # as computers write it: without "+", and no zero before it

Dtype = Literal["int", "float", "text"]
Kind = Literal["int", "float", "text", "id", "key"]
"""A dtype; or, of a feature without one, "id": whole numbers, or if it is hashed "key": texts too."""
Mask = NDArray[np.bool_]
MISSING_TEXTS = ("", r"\N")
"""Texts that stand for a missing value, wherever values come from."""
_BLANKS = " \t"
_WHOLE_NUMBER = re.compile(r"[+-]?[0-9]+")
_REAL_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_LARGEST = float.fromhex("0x1.ffffffp+127")  # from here on float32 rounds to infinity
_EXACT = 2**53  # from here on a float of 64 bits may be another whole number than was meant
_WORDS = {
    "int": "whole number from -2**63 to 2**63 - 1",
    "float": "finite number",
    "text": "text",
    "id": "whole number from -2**63 to 2**63 - 1",
    "key": "whole number of 64 bits and no text",
}
_ADVICE = {
    "id": "set hashed=True for texts, or dtype='int' for numbers such as 7.0",
    "key": "declare a dtype, such as 'float' with Bucketize",
}
_DTYPES = {"int": np.int64, "float": np.float32, "text": object, "id": np.int64, "key": object}


@checked
def hashed(values: ArrayLike, buckets: NonNegativeInt = 0, salt: str = "") -> Ids:
    """Return the id of each value, int64 [n], which is the same in every process on every machine.

    A text that is a whole number of 64 bits as computers write it, such as "15", stands for that number,
    since files and messages have ids either way. Another text ("015", "red") stands for the first 8 bytes of
    the BLAKE2b (RFC 7693) of its UTF-8. Bytes are as texts. The numbers are mixed by splitmix64's finalizer,
    which maps no two numbers to one id.

    Args:
        values: Whole numbers of 64 bits, texts or bytes, [n].
        buckets: Ids are 0 to buckets - 1, or any int64 if this is 0.
        salt: A different salt gives different ids.

    Raises:
        IdError: A value is of another type.
    """
    given, values = values, as_plain(values)
    if values.ndim == 0:
        raise IdError(f"{given!r:.80} cannot be hashed to ids; give a list of values")
    if values.dtype.kind in "iu":
        numbers = values.astype(np.uint64)
    else:
        items = values.tolist() if values.size else []
        try:
            numbers = text_numbers(items)
        except (TypeError, UnicodeEncodeError):
            numbers = _mixed_numbers(items)
    if salt:
        digest = hashlib.blake2b(salt.encode(), digest_size=8).digest()
        numbers = numbers ^ np.uint64(int.from_bytes(digest, "little"))
    hashes = hash_ids(numbers.view(np.int64))
    return (hashes % np.uint64(buckets) if buckets else hashes).view(np.int64)


def _mixed_numbers(values: list[Any]) -> NDArray[np.uint64]:
    """Return the numbers of values that are not all texts, by the UTF-8 of each distinct value.

    Raises:
        IdError: A value is neither a text nor a whole number.
    """
    try:
        distinct, indices = distinct_values(values)
    except TypeError:
        raise IdError(f"{values!r} cannot be hashed to ids; give texts, [n]") from None
    return utf8_numbers([_utf8(value) for value in distinct])[indices]


def distinct_values(values: list[Any]) -> tuple[list[Any], NDArray[np.intp]]:
    """Return the distinct values, and for each value its index among them, [n]. 1, 1.0 and True differ.

    Raises:
        TypeError: A value is a list.
    """
    # Equal numbers of different types are one key of a dict, so there the type is part of the key.
    has_types = len(set(map(type, values)) - {str, bytes}) > 1
    keys = list(zip(map(type, values), values, strict=True)) if has_types else values
    place_of = {key: index for index, key in enumerate(dict.fromkeys(keys))}
    distinct = [value for _, value in place_of] if has_types else list(place_of)
    return distinct, np.fromiter(map(place_of.__getitem__, keys), np.intp, len(keys))


def _utf8(value: Any) -> bytes:
    """Return the bytes of a text, or of the digits of a whole number."""
    try:
        key = value if isinstance(value, bytes) else _key(value)
    except ValueError:
        raise IdError(
            f"{value!r:.80} cannot be hashed to an id; it must be a whole number of 64 bits or a text"
        ) from None
    return key if isinstance(key, bytes) else str(key).encode()


def _fits(number: int) -> bool:
    return -(2**63) <= number < 2**64


def are_value(values: NDArray[Any], value: int | str) -> NDArray[np.bool_]:
    """Return a mask of the values, [n], that equal this one. A number equals the text of its digits."""
    text = str(value)
    whole = int(text) if _WHOLE.fullmatch(text) else None
    if values.dtype.kind not in "OUS":
        return np.asarray(values == whole) if whole is not None else np.zeros(len(values), bool)
    same = np.asarray(values == (text.encode() if values.dtype.kind == "S" else text))
    return same | (values == whole) if values.dtype.kind == "O" and whole is not None else same


def whole_number(text: str) -> int:
    """Read a whole number such as "7", " 007" or "-7" from a text of a file or a request.

    Blanks around it do not count. Python's `int` also takes `1_0` and the digits of other scripts.

    Raises:
        ValueError: The text is not a number from -2**63 to 2**63 - 1 in decimal digits of ASCII.
    """
    digits = text.strip(_BLANKS)
    number = int(digits) if _WHOLE_NUMBER.fullmatch(digits) else None
    if number is None or not -(2**63) <= number < 2**63:
        raise ValueError(text)
    return number


def real_number(text: str) -> float:
    """Read a number such as "7", ".5" or "-1e3" from a text of a file or a request; "nan" in any case is NaN.

    Blanks around it do not count. Python's `float` also takes `1_0`, "infinity" and the digits of other
    scripts.

    Raises:
        ValueError: The text is not a decimal number in ASCII, or the number is not finite as float32.
    """
    digits = text.strip(_BLANKS)
    if digits.lower() == "nan":
        return math.nan
    number = float(digits) if _REAL_NUMBER.fullmatch(digits) else math.inf
    if not abs(number) < _LARGEST:
        raise ValueError(text)
    return number


def as_typed(owner: str, bags: Jagged, kind: Kind) -> Jagged:
    """Convert values to their declared type with `typed`, and leave out those that are missing.

    Values that have the type already are returned as they are.

    Raises:
        IdError: A value is not of the type; the error quotes it and its sample.
    """
    if bags.values.dtype == np.int64 and kind in ("int", "id", "key"):
        return bags
    values, missing, bad = typed(bags.values, kind)
    if bad.any():
        bad_value = int(np.argmax(bad))
        raise refusal(
            owner, bags.values[bad_value : bad_value + 1].tolist()[0], kind, bags.rows[bad_value]
        )
    out = bags if values is bags.values else bags.with_values(values)
    return out.kept(~missing) if missing.any() else out


def refusal(owner: str, value: Any, kind: Kind, sample: int) -> IdError:
    """Return the error for a value that `typed` has found bad."""
    advice = _ADVICE.get(kind, f"declare another dtype than {kind!r}")
    value = value.item() if isinstance(value, np.generic) else value
    return IdError(
        f"{owner} has the value {value!r:.80}, which is {reason(value, kind)}; correct it in sample "
        f"{sample}, or {advice}"
    )


def reason(value: Any, kind: Kind) -> str:
    """Return what is wrong with a value that `typed` has found bad, such as "no finite number"."""
    if isinstance(value, str) and "." in value:
        with contextlib.suppress(ValueError):
            value = real_number(value)
    is_whole = isinstance(value, float | np.floating) and float(value).is_integer()
    if is_whole and (kind == "int" or (kind == "id" and abs(value) >= 2**24)):
        return (
            "a float that may have been another whole number (float64 is exact below 2**53, float32 below "
            "2**24), as in a column of ids that became floats because one value is missing; keep ids as "
            "whole numbers, such as Int64 of pandas"
        )
    return f"no {_WORDS[kind]}"


def typed(values: NDArray[Any], kind: Kind) -> tuple[NDArray[Any], Mask, Mask]:
    """Convert values to a type, and return masks of the missing values and of those that have another type.

    This is the only place that decides what a value stands for, wherever it comes from. docs/features.md has
    the rules as a table. None, NaN and `MISSING_TEXTS` are missing values.

    Args:
        values: [n], of any kind.
        kind: The type.

    Returns:
        values [n], arbitrary where a mask is true: int64, float32, or an object array of str; of keys any
        whole numbers, or an object array of str and int. Masks of the missing and the bad, bool [n].
    """
    of = values.dtype.kind
    if kind in ("int", "id") and of in "iuf":
        return _whole_numbers(values, kind)
    if kind == "float" and of in "iufb":
        return _floats(values)
    if kind == "key" and of in "iu":
        return values, _none(values), _none(values)
    if kind == "text" and of in "iu":
        return values.astype(str).astype(object), _none(values), _none(values)
    if of not in "iufbOUS":  # such as times, of which `tolist` may make numbers
        return values, _none(values), ~_none(values)
    texts = _all_texts(values) if kind in ("text", "key") and of in "OU" else None
    return _one_by_one(values, kind) if texts is None else texts


def _none(values: NDArray[Any]) -> Mask:
    return np.zeros(len(values), np.bool_)


def _whole_numbers(values: NDArray[Any], kind: Kind) -> tuple[NDArray[Any], Mask, Mask]:
    missing = bad = _none(values)
    if values.dtype.kind == "f":
        missing, exact = np.isnan(values), exact_below(values.dtype)
        whole = (np.abs(values) < exact) & (values == np.floor(values))
        bad = ~missing & ~whole if kind == "int" else ~missing
        values = np.where(missing | bad, 0, values)
    elif values.dtype == np.uint64:
        bad = values >= np.uint64(2**63)
    return values.astype(np.int64, copy=False), missing, bad


def _floats(values: NDArray[Any]) -> tuple[NDArray[Any], Mask, Mask]:
    with np.errstate(over="ignore"):
        floats = values.astype(np.float32, copy=False)
    return floats, np.isnan(floats), np.isinf(floats)


def _all_texts(values: NDArray[Any]) -> tuple[NDArray[Any], Mask, Mask] | None:
    """Judge texts all at once. Returns None if a value is no text, or a text has no UTF-8."""
    items = values.tolist()
    try:
        joined = "\n".join(["", *items, ""])
        if not joined.isascii():
            joined.encode()
    except (TypeError, UnicodeEncodeError):
        return None
    values = values if values.dtype == object else np.fromiter(items, object, len(items))
    missing = _none(values)
    # Searching one joined text takes a tenth of the time of comparing each text.
    if "\n\n" in joined or r"\N" in joined:
        missing = np.isin(values, MISSING_TEXTS)
    return values, missing, _none(values)


def _one_by_one(values: NDArray[Any], kind: Kind) -> tuple[NDArray[Any], Mask, Mask]:
    """Convert values in Python, each distinct value once."""
    items = values.tolist()
    try:
        distinct, indices = distinct_values(items)
    except TypeError:  # lists in lists
        distinct, indices = items, np.arange(len(items))
    outputs, missing, bad = [], np.zeros(len(distinct), np.bool_), np.zeros(len(distinct), np.bool_)
    convert, empty = _CONVERTERS[kind]
    for at, value in enumerate(distinct):
        output = None
        try:
            missing[at] = is_missing(value)
            output = None if missing[at] else convert(value)
            missing[at] = output is None
        except (ValueError, OverflowError):
            bad[at] = True
        outputs.append(empty if output is None else output)
    return np.array(outputs, _DTYPES[kind])[indices], missing[indices], bad[indices]


def is_of(value: Any, kind: Kind) -> bool:
    """Return whether a single value can be read as this type, or is missing."""
    try:
        return is_missing(value) or _CONVERTERS[kind][0](value) is not NotImplemented
    except (ValueError, OverflowError):
        return False


def is_missing(value: Any) -> bool:
    """Return whether a value is None, NaN, NA of pandas, or one of `MISSING_TEXTS`."""
    if isinstance(value, float | np.floating):
        return bool(np.isnan(value))
    if isinstance(value, bytes):
        return value in _MISSING_BYTES
    return (
        value is None
        or (isinstance(value, str) and value in MISSING_TEXTS)
        or type(value).__name__ in ("NAType", "NaTType")
    )


_MISSING_BYTES = [text.encode() for text in MISSING_TEXTS]


def _written(value: str | bytes) -> str:
    """Return the text, checked to have a UTF-8 form.

    Raises:
        ValueError: The text has half a surrogate pair, or the bytes are not UTF-8.
    """
    if isinstance(value, bytes):
        return value.decode()
    value.encode()
    return str(value)


def _int(value: Any) -> int:
    """Return a number whose type is that of whole numbers."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ValueError(value)
    return int(value)


def _id(value: Any) -> int:
    if not -(2**63) <= (number := _int(value)) < 2**63:
        raise ValueError(value)
    return number


def _whole(value: Any) -> int | None:
    """Return a whole number, also from a text or a float that is one."""
    if isinstance(value, str | bytes):
        text = _written(value).strip(_BLANKS)
        if text in MISSING_TEXTS or text.lower() == "nan":
            return None
        digits = text.rstrip("0").removesuffix(".") if "." in text else text
        number = whole_number(digits)
        if digits != text and abs(number) >= _EXACT:  # a float has been written
            raise ValueError(value)
        return number
    if isinstance(value, float | np.floating):
        number = _EXACT if not float(value).is_integer() else int(value)
        if abs(number) >= min(_EXACT, exact_below(np.dtype(type(value)))):
            raise ValueError(value)
        return number
    return _id(value)


def _float(value: Any) -> float | None:
    if isinstance(value, str | bytes):
        text = _written(value).strip(_BLANKS)
        number = math.nan if text in MISSING_TEXTS else real_number(text)
        return None if math.isnan(number) else number
    if not isinstance(value, int | float | np.integer | np.floating | np.bool_):
        raise ValueError(value)
    number = float(value)
    if not abs(number) < _LARGEST:
        raise ValueError(value)
    return number


def _text(value: Any) -> str:
    return _written(value) if isinstance(value, str | bytes) else str(_int(value))


def _key(value: Any) -> str | int:
    if isinstance(value, str | bytes):
        return _written(value)
    if not _fits(number := _int(value)):
        raise ValueError(value)
    return number


_CONVERTERS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "int": (_whole, 0),
    "float": (_float, 0.0),
    "text": (_text, ""),
    "id": (_id, 0),
    "key": (_key, ""),
}
