"""Kernels that number the distinct ids of several pushes on a CUDA device, in order of first occurrence.

For the ids 7 3 and 7 9 of two pushes, in the order of the launches:

    claim      entries   4 1 4 2      entry of each id in a hash table
               latest    . 3 1 . 4    by entry: number of all ids minus the position of its first id
    flag       firsts    1 1 0 1      1 where an id occurs for the first time
               counts    2 1          number of these in each chunk of ids, here of 2
    place      starts    0 2 3        number of these before each chunk, and in all
    number     unique    7 3 9        the distinct ids
               numbers   0 1 . 2      number among them, where an id occurs for the first time
    encode     codes     0 1 0 2      number of each id among the distinct ids

The entry of an id depends on the order in which threads run, but only equal ids have the same entry, and
nothing else of it is used. So the results do not depend on that order. Entry 0 is for the id whose hash is 0.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,attr-defined,misc"

from numba import cuda, int64, uint32, uint64

from psfleet.core.engine.kernels.device.cuda_arithmetic import mix

NONE = uint64(0)  # key of a free entry of the hash table


@cuda.jit
def claim(keys, mask, ids, n, entries, latest):
    """Write the entry of each id in the hash table `keys`, uint64 [mask + 2], 0 at first.

    ids: uint64 [n]. entries: uint32 [n], written. latest: uint32 [mask + 2], 0 at first, written.
    """
    for i in range(cuda.grid(1), n, cuda.gridsize(1)):
        hash_ = mix(ids[i])
        entry = int64(0)
        if hash_ != NONE:
            position = int64(hash_ & uint64(mask))
            found_hash = cuda.atomic.cas(keys, 1 + position, NONE, hash_)
            while found_hash != NONE and found_hash != hash_:
                position = (position + 1) & mask
                found_hash = cuda.atomic.cas(keys, 1 + position, NONE, hash_)
            entry = 1 + position
        entries[i] = uint32(entry)
        cuda.atomic.max(latest, entry, uint32(n - i))


@cuda.jit
def flag(entries, latest, n, shift, firsts, counts):
    """Write firsts[i] = 1 if id i occurs for the first time, else 0, and count these ids by chunk.

    shift: chunk c has the ids c << shift to ((c + 1) << shift) - 1. counts: int64 [chunks], 0 at first.
    """
    for i in range(cuda.grid(1), n, cuda.gridsize(1)):
        is_first = int64(latest[entries[i]]) == n - i
        firsts[i] = is_first
        if is_first:
            cuda.atomic.add(counts, i >> shift, 1)


@cuda.jit
def place(counts, chunks, starts):
    """Write the sum of the counts before each chunk, and behind them the sum of all: int64 [chunks + 1]."""
    for chunk in range(cuda.grid(1), chunks + 1, cuda.gridsize(1)):
        start = int64(0)
        for before in range(chunk):
            start += counts[before]
        starts[chunk] = start


@cuda.jit
def number(ids, n, shift, firsts, starts, unique, numbers):
    """Write the ids that occur for the first time, in order, and for each its number among them."""
    for i in range(cuda.grid(1), n, cuda.gridsize(1)):
        if firsts[i] != 0:
            chunk = i >> shift
            position = starts[chunk]
            for before in range(chunk << shift, i):
                position += firsts[before]
            unique[position] = ids[i]
            numbers[i] = uint32(position)


@cuda.jit
def encode(entries, latest, n, numbers, codes):
    """Write the number of each id among the distinct ids: codes[i], uint32 [n]."""
    for i in range(cuda.grid(1), n, cuda.gridsize(1)):
        codes[i] = numbers[n - int64(latest[entries[i]])]
