"""Kernel that turns texts into numbers of 64 bits: whole numbers as they are, others by BLAKE2b (RFC 7693).

    texts     r e d 1 5 h a t ........     one after the other in UTF-8, and 8 readable bytes behind the last
    lengths   3     2   3                  bytes of each text
    out       BLAKE2b("red"), 15, BLAKE2b("hat")

psfleet/core/engine/kernels/text_hashing.py calls it. hashlib computes the same hash but takes five times as
long, because most texts are short and preparing a hash object costs more than hashing one block.

Columns often repeat texts, such as names of countries. So a small table remembers, for each of its slots, the
last text that was looked up there. A repeated text then costs a comparison instead of a hash, unless another
text has taken its slot in between.
"""
import numpy as np
from numba import int64, uint64, void

from psfleet.core.engine.kernels.hashing import mix
from psfleet.core.engine.kernels.intrinsics import (helper, kernel, load_i64, load_u64, store_i64,
                                                    store_u64)

U = uint64  # a bare literal is int64, and int64 with uint64 makes float64
BLOCK = 128  # bytes
PARAMETERS = U(0x01010000 ^ 8)  # no key, one leaf, a digest of 8 bytes
LAST = ~U(0)
SIGN = U(1 << 63)

# IV and SIGMA of RFC 7693: the first eight words of the state, and the order in which each round uses the 16
# words of a block.
FIRST = np.array([0x6A09E667F3BCC908, 0xBB67AE8584CAA73B, 0x3C6EF372FE94F82B, 0xA54FF53A5F1D36F1,
                  0x510E527FADE682D1, 0x9B05688C2B3E6C1F, 0x1F83D9ABFB41BD6B, 0x5BE0CD19137E2179],
                 np.uint64)
WORDS = np.array([[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15],
                  [14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3],
                  [11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4],
                  [7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8],
                  [9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13],
                  [2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9],
                  [12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11],
                  [13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10],
                  [6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5],
                  [10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0]], np.int64)


@helper
def rotated(x, count):
    """Return x with its bits rotated to the right by `count`."""
    return (x >> U(count)) | (x << U(64 - count))


@helper
def mixed(a, b, c, d, x, y):
    """Mix two words of the block into a column or diagonal of the state, and return it (G of the RFC)."""
    a = a + b + x
    d = rotated(d ^ a, 32)
    c = c + d
    b = rotated(b ^ c, 24)
    a = a + b + y
    d = rotated(d ^ a, 16)
    c = c + d
    b = rotated(b ^ c, 63)
    return a, b, c, d


@helper
def compressed(h, block, count, last):
    """Return the state h, eight words, after the block at an address has been hashed (function F of the RFC).

    count: number of bytes up to the end of this block. last: LAST for the last block, else 0.
    """
    #     a0 a1 a2 a3        a round mixes the four columns (a0 b0 c0 d0, ...),
    #     b0 b1 b2 b3        then the four diagonals (a0 b1 c2 d3, ...)
    #     c0 c1 c2 c3
    #     d0 d1 d2 d3
    #
    # The 16 words are local variables, so that they stay in registers.
    a0, a1, a2, a3, b0, b1, b2, b3 = h
    c0, c1, c2, c3 = FIRST[0], FIRST[1], FIRST[2], FIRST[3]
    d0, d1, d2, d3 = FIRST[4] ^ U(count), FIRST[5], FIRST[6] ^ last, FIRST[7]
    for number in range(12):
        at = WORDS[number % 10]
        a0, b0, c0, d0 = mixed(a0, b0, c0, d0, load_u64(block, at[0]), load_u64(block, at[1]))
        a1, b1, c1, d1 = mixed(a1, b1, c1, d1, load_u64(block, at[2]), load_u64(block, at[3]))
        a2, b2, c2, d2 = mixed(a2, b2, c2, d2, load_u64(block, at[4]), load_u64(block, at[5]))
        a3, b3, c3, d3 = mixed(a3, b3, c3, d3, load_u64(block, at[6]), load_u64(block, at[7]))
        a0, b1, c2, d3 = mixed(a0, b1, c2, d3, load_u64(block, at[8]), load_u64(block, at[9]))
        a1, b2, c3, d0 = mixed(a1, b2, c3, d0, load_u64(block, at[10]), load_u64(block, at[11]))
        a2, b3, c0, d1 = mixed(a2, b3, c0, d1, load_u64(block, at[12]), load_u64(block, at[13]))
        a3, b0, c1, d2 = mixed(a3, b0, c1, d2, load_u64(block, at[14]), load_u64(block, at[15]))
    return (h[0] ^ a0 ^ c0, h[1] ^ a1 ^ c1, h[2] ^ a2 ^ c2, h[3] ^ a3 ^ c3,
            h[4] ^ b0 ^ d0, h[5] ^ b1 ^ d1, h[6] ^ b2 ^ d2, h[7] ^ b3 ^ d3)


@helper
def word_of(text, length, word):
    """Return 8 bytes of a text as uint64; bytes behind the end of the text are zeros."""
    bits = 8 * min(max(length - 8 * word, 0), 8)
    value = load_u64(text, word) if bits else U(0)
    return value if bits == 64 else value & ((U(1) << U(bits)) - U(1))


@helper
def digest(text, length, block):
    """Return the BLAKE2b hash of a text with a digest of 8 bytes.

    block: address of 128 bytes of scratch memory.
    """
    h = (FIRST[0] ^ PARAMETERS, FIRST[1], FIRST[2], FIRST[3], FIRST[4], FIRST[5], FIRST[6], FIRST[7])
    start = 0
    while length - start > BLOCK:
        h = compressed(h, text + start, start + BLOCK, U(0))
        start += BLOCK
    for word in range(BLOCK // 8):
        store_u64(block, word, word_of(text + start, length - start, word))
    return compressed(h, block, length, LAST)[0]


@helper
def whole_number(text, length):
    """Return whether a text is a whole number of 64 bits as programs write it, and the number as uint64.

    Programs write no "+", no "-0" and no leading zeros. A negative number is returned as its two's
    complement.
    """
    is_negative = U(load_u64(text, 0) & U(0xFF)) == U(45)  # "-"
    start = int64(is_negative)
    value = U(0)
    if length <= start or length - start > 20:
        return False, value
    for k in range(start, length):
        digit = (load_u64(text + k, 0) & U(0xFF)) - U(48)
        # The largest number, 2**64 - 1, is 18446744073709551615.
        if digit > U(9) or value > U(1844674407370955161) or (value == U(1844674407370955161) and digit > U(5)):
            return False, value
        if value == U(0) and (k > start or (digit == U(0) and is_negative)):
            return False, value
        value = value * U(10) + digit
    return not (is_negative and value > SIGN), U(0) - value if is_negative else value


@helper
def are_same(text, other, length):
    """Return whether two texts of the same length have the same bytes."""
    for word in range((length + 7) // 8):
        if word_of(text, length, word) != word_of(other, length, word):
            return False
    return True


@helper
def slot_of(text, length, slots):
    """Return the number of the slot that a text uses in a table of `slots` slots, a power of two."""
    x = U(length)
    for word in range((length + 7) // 8):
        x = mix(x ^ word_of(text, length, word))
    return int64(x & U(slots - 1))


@kernel(void(int64, int64, int64, int64, int64, int64))
def numbers(texts, lengths, count, memory, slots, out):
    """Write the number of each text to `out`, uint64 [count].

    texts, lengths: addresses of the arrays drawn at the head of this file; lengths are int64 [count].
    memory: address of zeros: 128 bytes of scratch for a block, then the table of texts seen in this call,
    int64 [slots, 2]: for each slot the position + 1 of its last text, and the address of that text.
    """
    block, table = memory, memory + BLOCK
    text = texts
    for k in range(count):
        length = load_i64(lengths, k)
        slot = 2 * slot_of(text, length, slots)
        other = load_i64(table, slot) - 1
        if other >= 0 and load_i64(lengths, other) == length and are_same(
                text, load_i64(table, slot + 1), length):
            store_u64(out, k, load_u64(out, other))
        else:
            is_whole, value = whole_number(text, length)
            store_u64(out, k, value if is_whole else digest(text, length, block))
            store_i64(table, slot, k + 1)
            store_i64(table, slot + 1, text)
        text += length
