"""Types of values: judges each value by its declared type, converts it, and hashes values to ids.

`typed` decides what a value such as "007", NaN or 7.0 means, in every file, request and batch.
tests/feature_sets/test_routes.py is its specification. Whole columns are judged at once where possible, and
otherwise value by value.
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
"""Type of values: a declared dtype or, for a feature without a dtype, "id" or "key". "id" allows integers.
"key", for hashed features, allows integers and texts.
"""
Mask = NDArray[np.bool_]
MISSING_TEXTS = ("", r"\N")
"""Texts that mean a missing value, in files, messages and requests."""
_BLANKS = " \t"
_WHOLE_NUMBER = re.compile(r"[+-]?[0-9]+")
_REAL_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_LARGEST = float.fromhex("0x1.ffffffp+127")  # numbers from here on become infinite as float32
_EXACT = 2**53  # from here on float64 cannot represent every integer
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
    """Return the id of each value, int64 [n]. The same value has the same id in every process, on every
    machine.

        hashed(["red", "15", 15], buckets=1000)  # "15" and 15 have the same id

    Each value first becomes a 64-bit number. An integer is this number itself. A text is treated as an
    integer if it is written as computers write 64-bit integers, such as "15", because the same ids may come
    as integers or as texts. Any other text ("015", "red") gives the first 8 bytes of the BLAKE2b hash (RFC
    7693) of its UTF-8. Bytes are treated as UTF-8 texts. Then the number is mixed by the finalizer of
    splitmix64, which never maps two numbers to one id.

    Args:
        values: 64-bit integers, texts or bytes, [n].
        buckets: Range of the ids: 0 to buckets - 1. 0 means any int64.
        salt: Text that changes all ids. Different salts give different ids.

    Raises:
        IdError: A value has another type.
    """
    argument, values = values, as_plain(values)
    if values.ndim == 0:
        raise IdError(f"{argument!r:.80} cannot be hashed to ids; give a list of values")
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
    """Return the 64-bit number of each value if the values are not all texts. Works on the UTF-8 of each
    distinct value.

    Raises:
        IdError: A value is neither a text nor an integer.
    """
    try:
        distinct, indices = distinct_values(values)
    except TypeError:
        raise IdError(f"{values!r} cannot be hashed to ids; give texts, [n]") from None
    return utf8_numbers([_utf8(value) for value in distinct])[indices]


def distinct_values(values: list[Any]) -> tuple[list[Any], NDArray[np.intp]]:
    """Return the distinct values, and for each value its index among these, [n]. 1, 1.0 and True are
    distinct.

    Raises:
        TypeError: A value is a list.
    """
    # A dict takes equal numbers of different types as one key, so the type is made part of the key.
    has_types = len(set(map(type, values)) - {str, bytes}) > 1
    keys = list(zip(map(type, values), values, strict=True)) if has_types else values
    place_of = {key: index for index, key in enumerate(dict.fromkeys(keys))}
    distinct = [value for _, value in place_of] if has_types else list(place_of)
    return distinct, np.fromiter(map(place_of.__getitem__, keys), np.intp, len(keys))


def _utf8(value: Any) -> bytes:
    try:
        key = value if isinstance(value, bytes) else _key(value)
    except ValueError:
        raise IdError(
            f"{value!r:.80} cannot be hashed to an id; it must be a whole number of 64 bits or a text"
        ) from None
    return key if isinstance(key, bytes) else str(key).encode()


def are_value(values: NDArray[Any], value: int | str) -> NDArray[np.bool_]:
    """Return a mask of the values, [n], that are equal to `value`. A number is equal to the text of its
    digits.
    """
    text = str(value)
    whole = int(text) if _WHOLE.fullmatch(text) else None
    if values.dtype.kind not in "OUS":
        return np.asarray(values == whole) if whole is not None else np.zeros(len(values), bool)
    same = np.asarray(values == (text.encode() if values.dtype.kind == "S" else text))
    return same | (values == whole) if values.dtype.kind == "O" and whole is not None else same


def whole_number(text: str) -> int:
    """Parse an integer such as "7", " 007" or "-7" in a file or a request.

    Blanks around it are ignored. Unlike Python's `int`, this refuses `1_0` and digits of other scripts.

    Raises:
        ValueError: The text is not an integer from -2**63 to 2**63 - 1 in ASCII digits.
    """
    digits = text.strip(_BLANKS)
    number = int(digits) if _WHOLE_NUMBER.fullmatch(digits) else None
    if number is None or not -(2**63) <= number < 2**63:
        raise ValueError(text)
    return number


def real_number(text: str) -> float:
    """Parse a number such as "7", ".5" or "-1e3" in a file or a request. "nan", in any case, is NaN.

    Blanks around it are ignored. Unlike Python's `float`, this refuses `1_0`, "infinity" and digits of
    other scripts.

    Raises:
        ValueError: The text is not a decimal number in ASCII, or is not finite as float32.
    """
    digits = text.strip(_BLANKS)
    if digits.lower() == "nan":
        return math.nan
    number = float(digits) if _REAL_NUMBER.fullmatch(digits) else math.inf
    if not abs(number) < _LARGEST:
        raise ValueError(text)
    return number


def as_typed(owner: str, bags: Jagged, kind: Kind) -> Jagged:
    """Convert values to their declared type as `typed` does, and leave out missing values.

    If no value must be converted, `bags` itself is returned.

    Raises:
        IdError: A value does not have the type. The message quotes the value and names its sample.
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
    """Return the error to raise for a value that `typed` has found bad."""
    advice = _ADVICE.get(kind, f"declare another dtype than {kind!r}")
    value = value.item() if isinstance(value, np.generic) else value
    return IdError(
        f"{owner} has the value {value!r:.80}, which is {reason(value, kind)}; correct it in sample "
        f"{sample}, or {advice}"
    )


def reason(value: Any, kind: Kind) -> str:
    """Return the reason that `typed` has found a value bad, such as "no finite number"."""
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
    """Convert values to a type, and return the converted values, a mask of missing values and a mask of bad
    values.

    No other function decides what a value means. docs/features.md has the rules as a table. None, NaN and
    `MISSING_TEXTS` are missing values. Values that do not have the type are bad.

    Args:
        values: Values of any type, [n].

    Returns:
        values [n], with arbitrary entries where a mask is true. "int" and "id" give int64, "float" float32,
        and "text" an object array of str. "key" gives integers of any dtype, or an object array of str and
        int. Both masks are bool [n].
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
    if of not in "iufbOUS":  # times, for example, which `tolist` may turn into numbers
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
    """Convert texts all at once. Returns None if a value is not a text, or a text cannot be encoded
    in UTF-8.
    """
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
    """Convert values one by one in Python, each distinct value once."""
    items = values.tolist()
    try:
        distinct, indices = distinct_values(items)
    except TypeError:  # a value is a list, which cannot be hashed
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
    """Return True if a single value has this type or is missing."""
    try:
        if not is_missing(value):
            _CONVERTERS[kind][0](value)
    except (ValueError, OverflowError):
        return False
    return True


def is_missing(value: Any) -> bool:
    """Return True if a value is None, NaN, pandas' NA, or one of `MISSING_TEXTS`."""
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
    """Return a text as str, after a check that it can be encoded in UTF-8.

    Raises:
        ValueError: The text has half of a surrogate pair, or the bytes are not UTF-8.
    """
    if isinstance(value, bytes):
        return value.decode()
    value.encode()
    return str(value)


def _int(value: Any) -> int:
    """Return a number of an integer type as int.

    Raises:
        ValueError: The value has another type.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ValueError(value)
    return int(value)


def _id(value: Any) -> int:
    if not -(2**63) <= (number := _int(value)) < 2**63:
        raise ValueError(value)
    return number


def _whole(value: Any) -> int | None:
    """Return a value as int if it is an integer, or a text or float that is equal to one."""
    if isinstance(value, str | bytes):
        text = _written(value).strip(_BLANKS)
        if text in MISSING_TEXTS or text.lower() == "nan":
            return None
        digits = text.rstrip("0").removesuffix(".") if "." in text else text
        number = whole_number(digits)
        if digits != text and abs(number) >= _EXACT:  # a float, perhaps rounded
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
    if not -(2**63) <= (number := _int(value)) < 2**64:
        raise ValueError(value)
    return number


_CONVERTERS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "int": (_whole, 0),
    "float": (_float, 0.0),
    "text": (_text, ""),
    "id": (_id, 0),
    "key": (_key, ""),
}
