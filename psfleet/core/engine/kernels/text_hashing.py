"""Hashes texts to numbers of 64 bits, many in one call of a kernel. They are the ids of hashed features.

Trained models find their rows by these numbers, so a text's number must never change. The reference is
hashlib's BLAKE2b (tests/kernels/test_text_hashing.py), which takes five times as long for short texts. The
kernel is sources/text_numbers.py.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from psfleet.core.engine.kernels.generate import static_kernels
from psfleet.core.engine.kernels.initial_values import address_of

# Entries of the kernel's table of texts that it has hashed already: 128 kB, which fits into a second-level
# cache.
_SLOTS = 1 << 13
_BLOCK = 16  # words of 64 bits of a block of BLAKE2b
# Zeros behind the last text, because the kernel reads the end of a text as a whole word.
_SPARE = bytes(8)


def text_numbers(texts: Sequence[str]) -> NDArray[np.uint64]:
    """Return a number for each text, uint64 [n].

    A text that is a whole number of 64 bits in its usual form, such as "15" or "-3", gives that number modulo
    2**64. Every other text, such as "red", "015" or "+3", gives the BLAKE2b hash of its UTF-8 with a digest
    of 8 bytes, the lowest byte first.

    Raises:
        TypeError: A value is not a str.
        UnicodeEncodeError: A text has half a surrogate pair.
    """
    joined = "".join(texts)
    utf8 = joined.encode()
    # The kernel needs the length of each text in bytes. If all characters are ASCII, as is usual, that is the
    # length of the str. Otherwise each text has to be encoded by itself.
    parts = texts if len(utf8) == len(joined) else [text.encode() for text in texts]
    return _numbers(utf8, parts)


def utf8_numbers(texts: Sequence[bytes]) -> NDArray[np.uint64]:
    """Return a number for each text as `text_numbers` does, from texts that are UTF-8 already."""
    return _numbers(b"".join(texts), texts)


def _numbers(utf8: bytes, parts: Sequence[str | bytes]) -> NDArray[np.uint64]:
    """Return the number of each text.

    Args:
        utf8: All texts, one after the other.
        parts: Sequence whose items are as long as the texts are in bytes; only their lengths are used.
    """
    lengths = np.fromiter(map(len, parts), np.int64, len(parts))
    data = np.frombuffer(utf8 + _SPARE, np.uint8)
    slots = min(1 << len(parts).bit_length(), _SLOTS)
    scratch, out = np.zeros(_BLOCK + 2 * slots, np.uint64), np.empty(len(parts), np.uint64)
    texts, memory = address_of(data), address_of(scratch)
    static_kernels("text_numbers").numbers(
        texts, address_of(lengths), len(parts), memory, slots, address_of(out)
    )
    return out
