"""Numbers of 64 bits for texts, from which ids of hashed features are made: many texts in one call of a kernel.

The numbers are part of every trained model whose features are hashed, so they can never change. The reference is
hashlib's BLAKE2b in tests/kernels/test_text_hashing.py.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from psfleet.core.engine.kernels.generate import static_kernels
from psfleet.core.engine.kernels.initial_values import address_of

_SPARE = bytes(8)  # the kernel reads whole words, also where the last text ends


def text_numbers(texts: Sequence[str]) -> NDArray[np.uint64]:
    """Return a number for each text, uint64 [n].

    A text that is a whole number of 64 bits as computers write it, such as "15" or "-3", has that number, modulo
    2**64. Another text has the first 8 bytes of the BLAKE2b of its UTF-8, the lowest byte first.

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
    data, block = np.frombuffer(utf8 + _SPARE, np.uint8), np.empty(16, np.uint64)
    out = np.empty(len(parts), np.uint64)
    static_kernels("text_numbers").numbers(
        address_of(data), address_of(lengths), len(parts), address_of(block), address_of(out)
    )
    return out
