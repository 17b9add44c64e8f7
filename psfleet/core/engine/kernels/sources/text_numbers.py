"""Kernel that turns texts into numbers of 64 bits: whole numbers as they are, others by BLAKE2b (RFC 7693).

    texts     r e d 1 5 h a t ........     one after the other in UTF-8, and 8 bytes that may be read behind
    lengths   3     2   3                  bytes of each
    out       BLAKE2b("red"), 15, BLAKE2b("hat")

psfleet/core/engine/kernels/text_hashing.py calls it. hashlib computes the same hash, but takes five times as long:
nearly all texts are short, and preparing a hash object costs more than hashing one block.

Columns repeat their texts, such as names of countries. A table remembers for each of its slots the text that came
there last, so that a text is hashed again only if another one has taken its slot in between.
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

# First values of SHA-512, and which word of a block each step of a round takes.
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
    """Return x with its bits moved `count` places to the right, and around."""
    return (x >> U(count)) | (x << U(64 - count))


@helper
def mixed(a, b, c, d, x, y):
    """Return a column or diagonal of the state with two words of the block mixed in (G of the RFC)."""
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
    """Return the hash h, eight words, with the block at an address taken in (F of the RFC).

    count: bytes up to the end of this block. last: LAST, or 0 where more blocks follow.
    """
    # The state is four rows a, b, c, d of four words. Its words stay in registers.
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
    """Return 8 bytes of a text as uint64, zeros in place of what is behind its end."""
    bits = 8 * min(max(length - 8 * word, 0), 8)
    value = load_u64(text, word) if bits else U(0)
    return value if bits == 64 else value & ((U(1) << U(bits)) - U(1))


@helper
def digest(text, length, block):
    """Return the first 8 bytes of a text's BLAKE2b, of which 8 is the whole length.

    block: address of 128 bytes, overwritten.
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
    """Return whether a text is a whole number of 64 bits as computers write it, and the number as uint64.

    Computers write no "+", no "-0" and no zero before other digits. A negative one is its two's complement.
    """
    is_negative = U(load_u64(text, 0) & U(0xFF)) == U(45)  # "-"
    start = int64(is_negative)
    value = U(0)
    if length <= start or length - start > 20:
        return False, value
    for k in range(start, length):
        digit = (load_u64(text + k, 0) & U(0xFF)) - U(48)
        # 2**64 - 1 is 18446744073709551615.
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
    """Return the slot of a text among `slots` of them, a power of two."""
    x = U(length)
    for word in range((length + 7) // 8):
        x = mix(x ^ word_of(text, length, word))
    return int64(x & U(slots - 1))


@kernel(void(int64, int64, int64, int64, int64, int64))
def numbers(texts, lengths, count, memory, slots, out):
    """Write the number of each text to `out`, uint64 [count].

    texts, lengths: addresses of what the head of this file shows; lengths are int64 [count].
    memory: address of zeros: the 128 bytes of a block; then int64 [slots, 2], of the text in a slot its place + 1
    and its address.
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
