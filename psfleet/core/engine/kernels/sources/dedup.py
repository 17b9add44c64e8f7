from numba import int64, uint32, uint64, void

from psfleet.core.engine.kernels.hashing import mix
from psfleet.core.engine.kernels.id_routing import VIRTUAL_SHARDS, virtual_shard
from psfleet.core.engine.kernels.intrinsics import (kernel, load_i64, load_u32, load_u64, prefetch_write,
                                        read_i64, store_i64, store_u32, store_u64)

BLOCK = 256


@kernel(int64(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64))
def dedup(ids, n, index, mask, hashes, unique, codes, routes, counts, inverse):
    """Number the distinct ids in first-seen order and give every id the code group << shift | place.

    index: uint32[mask + 1], zeroed here: number + 1 of the id that hashes there. hashes: a scratch
    of BLOCK uint64. unique, codes: of each number. routes: group of each virtual shard, already
    shifted. counts: int64 per virtual shard's group, addressed by routes' second half.
    """
    for i in range((mask + 1) // 2):
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
                if number < 0:
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
    """The place of the first id that has come before, or -1.

    A filter of one bit for each id tells most of them apart and stays in the nearest cache; only
    those whose bit was set, and those that look like them in a second filter, are looked up.

    hashes, index: as for `dedup`. bits: a scratch of low + 1 bits, a power of two of at least 64.
    places: uint32[n].
    """
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
    """Bring the ids from first-seen order to groups: out[offsets[group] + place] = id."""
    low = (int64(1) << shift) - 1
    for i in range(count):
        code = int64(load_u32(codes, i))
        place = load_i64(offsets, code >> shift) + (code & low)
        store_i64(out, place, load_i64(unique, i))
