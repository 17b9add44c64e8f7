"""Kernels that number the distinct ids of a batch, find a repeated id, and sort ids by server.

psfleet/core/engine/kernels/dedup.py calls them and owns the scratch memory. A *group* is one server's ids.

Each kernel processes the batch in blocks of BLOCK ids with short loops: hash, prefetch, work. The lookup
table of a large batch does not fit into the caches. With the prefetches the cache misses of a block overlap;
a plain loop would wait at each id.
"""
from numba import int64, uint32, uint64, void

from psfleet.core.engine.kernels.hashing import mix
from psfleet.core.engine.kernels.id_routing import VIRTUAL_SHARDS, virtual_shard
from psfleet.core.engine.kernels.intrinsics import (kernel, load_i64, load_u32, load_u64, prefetch_write,
                                        read_i64, store_i64, store_u32, store_u64)

BLOCK = 256


@kernel(int64(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64))
def dedup(ids, n, index, mask, hashes, unique, codes, routes, counts, inverse):
    """Number the distinct ids of a batch, and write a code for each id. Returns the number of distinct ids.

    A code says which server has the id, and the id's position among the distinct ids of that server:

        code = group << shift | position

    ids: int64 [n]. index: uint32 [mask + 1], cleared here: a hash table with the number + 1 of each distinct
    id. hashes: scratch of BLOCK uint64.
    routes: uint32 [2 * VIRTUAL_SHARDS], the group of each virtual shard, then group << shift.
    unique, codes: int64 and uint32, written for each distinct id, in the order of first occurrence.
    counts: int64 [groups], zeros at first, written: the number of distinct ids of each group.
    inverse: uint32 [n], written: the code of each id of the batch.
    """
    #     ids        7    3    7    9         (say 3 goes to group 1, and 7 and 9 to group 0)
    #     unique     7    3    9
    #     codes      0.0  1.0  0.1            (group.position)
    #     inverse    0.0  1.0  0.0  0.1
    for i in range((mask + 1) // 2):  # two entries of 32 bits at a time
        store_i64(index, i, 0)
    count = 0
    for start in range(0, n, BLOCK):
        size = min(BLOCK, n - start)
        block = ids + start * 8
        for j in range(size):
            store_u64(hashes, j, mix(uint64(read_i64(block, j))))
        for j in range(size):
            prefetch_write(index + (int64(load_u64(hashes, j)) & mask) * 4)
        for j in range(size):
            id_ = read_i64(block, j)
            hash_ = load_u64(hashes, j)
            place = int64(hash_) & mask
            while True:
                number = int64(load_u32(index, place)) - 1
                if number < 0:  # an empty entry ends the chain: the id is new
                    number = count
                    count += 1
                    store_u32(index, place, uint32(count))
                    store_i64(unique, number, id_)
                    shard = virtual_shard(hash_)
                    group = int64(load_u32(routes, shard))
                    within = load_i64(counts, group)
                    store_i64(counts, group, within + 1)
                    code = uint32(int64(load_u32(routes, VIRTUAL_SHARDS + shard)) | within)
                    store_u32(codes, number, code)
                    break
                if load_i64(unique, number) == id_:
                    code = load_u32(codes, number)
                    break
                place = (place + 1) & mask
            store_u32(inverse, start + j, code)
    return count


@kernel(int64(int64, int64, int64, int64, int64, int64, int64, int64))
def repeated(ids, n, hashes, bits, low, places, index, mask):
    """Return the position of the first id that occurs earlier in the batch, or -1 if no id is repeated.

    ids: int64 [n]. hashes, index, mask: as for `dedup`. bits: scratch of low + 1 bits, a power of two of at
    least 64. places: scratch of n uint32, which gets positions of ids in the batch.
    """
    # Three passes, of which most batches need only the first:
    #
    #     1   all ids    --> suspects      their bit of a filter was already set; none: return -1
    #     2   all ids    --> candidates    their bit is among the bits of suspects
    #     3   candidates --> repeated id   exact, by a hash table
    #
    # Most batches repeat no id, so finding that out must be cheap. A filter of one bit for each hash is much
    # smaller than a hash table and stays in the nearest cache. Only the few ids that the filter cannot tell
    # apart go through the hash table, which costs a cache miss for each.
    #
    # Pass 1: an id whose bit is already set is a suspect: it repeats an id, or its hash agrees with another
    # in the bits of `low`. `places[suspects]` is written for each id and kept only if the count advances, so
    # there is no branch to mispredict.
    for i in range((low + 1) // 64):
        store_i64(bits, i, 0)
    suspects = 0
    for start in range(0, n, BLOCK):
        size = min(BLOCK, n - start)
        block = ids + start * 8
        for j in range(size):
            store_u64(hashes, j, mix(uint64(read_i64(block, j))))
        for j in range(size):
            at = int64(load_u64(hashes, j)) & low
            word = load_u64(bits, at >> 6)
            store_u32(places, suspects, uint32(start + j))
            suspects += int64(word >> uint64(at & 63)) & 1
            store_u64(bits, at >> 6, word | uint64(1) << uint64(at & 63))
    if suspects == 0:
        return -1
    # Pass 2: the first occurrence of a repeated id found its bit clear, so it is no suspect. So mark all
    # suspects in a second filter, by other bits of the hash, and collect every id whose bit is marked. Now
    # all occurrences of a repeated id are candidates, in the order of the batch.
    for i in range((low + 1) // 64):
        store_i64(bits, i, 0)
    for j in range(suspects):
        at = int64(mix(uint64(read_i64(ids, int64(load_u32(places, j))))) >> uint64(32)) & low
        store_u64(bits, at >> 6, load_u64(bits, at >> 6) | uint64(1) << uint64(at & 63))
    count = 0
    for start in range(0, n, BLOCK):
        size = min(BLOCK, n - start)
        block = ids + start * 8
        for j in range(size):
            store_u64(hashes, j, mix(uint64(read_i64(block, j))) >> uint64(32))
        for j in range(size):
            at = int64(load_u64(hashes, j)) & low
            store_u32(places, count, uint32(start + j))
            count += int64(load_u64(bits, at >> 6) >> uint64(at & 63)) & 1
    # Pass 3: look the candidates up one by one, in a part of the hash table that is quick to clear.
    while mask > 4 * count:
        mask >>= 1
    for i in range((mask + 1) // 2):
        store_i64(index, i, 0)
    for j in range(count):
        id_ = read_i64(ids, int64(load_u32(places, j)))
        place = int64(mix(uint64(id_))) & mask
        while True:
            before = int64(load_u32(index, place)) - 1
            if before < 0:
                store_u32(index, place, uint32(j + 1))
                break
            if read_i64(ids, int64(load_u32(places, before))) == id_:
                return int64(load_u32(places, j))
            place = (place + 1) & mask
    return -1


@kernel(void(int64, int64, int64, int64, int64, int64))
def split(unique, codes, count, shift, offsets, out):
    """Sort the distinct ids by group (server), and within a group by first occurrence.

        out[offsets[group] + position] = id

    unique, codes, count, shift: as `dedup` wrote them. offsets: int64 [groups], the first position of each
    group.
    """
    low = (int64(1) << shift) - 1
    for i in range(count):
        code = int64(load_u32(codes, i))
        place = load_i64(offsets, code >> shift) + (code & low)
        store_i64(out, place, load_i64(unique, i))
