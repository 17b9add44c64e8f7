"""Hashes texts to numbers of 64 bits, many in one call of a kernel. Ids of hashed features are made of them.

Rows of trained models are found by these numbers, so they can never change. The reference is hashlib's
BLAKE2b (tests/kernels/test_text_hashing.py).
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from psfleet.core.engine.kernels.generate import static_kernels
from psfleet.core.engine.kernels.initial_values import address_of

_SLOTS = 1 << 13  # of the table of texts seen before: 128 kB, which fits into a second-level cache
_BLOCK = 16  # words
_SPARE = bytes(8)  # behind the last text, of whose end the kernel reads a whole word


def text_numbers(texts: Sequence[str]) -> NDArray[np.uint64]:
    """Return a number for each text, uint64 [n].

    A text that is a whole number of 64 bits as computers write it, such as "15" or "-3", has that number,
    modulo 2**64. Another text has the BLAKE2b of its UTF-8 with a digest of 8 bytes, the lowest byte first.

    Raises:
        TypeError: A value is not a str.
        UnicodeEncodeError: A text has half a surrogate pair.
    """
    joined = "".join(texts)
    utf8 = joined.encode()
    # A character is one byte if all are ASCII, as they mostly are. Then nothing needs to be encoded alone.
    parts = texts if len(utf8) == len(joined) else [text.encode() for text in texts]
    return _numbers(utf8, parts)


def utf8_numbers(texts: Sequence[bytes]) -> NDArray[np.uint64]:
    """Return a number for each text as `text_numbers` does, from the bytes of its UTF-8."""
    return _numbers(b"".join(texts), texts)


def _numbers(utf8: bytes, parts: Sequence[str | bytes]) -> NDArray[np.uint64]:
    """Return the number of each of the texts that `utf8` consists of, whose lengths in bytes `parts` have."""
    lengths = np.fromiter(map(len, parts), np.int64, len(parts))
    data = np.frombuffer(utf8 + _SPARE, np.uint8)
    slots = min(1 << len(parts).bit_length(), _SLOTS)
    scratch, out = np.zeros(_BLOCK + 2 * slots, np.uint64), np.empty(len(parts), np.uint64)
    texts, memory = address_of(data), address_of(scratch)
    static_kernels("text_numbers").numbers(
        texts, address_of(lengths), len(parts), memory, slots, address_of(out)
    )
    return out
