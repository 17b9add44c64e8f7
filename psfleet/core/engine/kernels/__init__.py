"""Compiled arithmetic: dedup and merge, first values, and each rule's dense and sparse kernels.

A kernel is a loop over a batch that numba compiles to machine code. Its text is in `sources/`, sometimes as
a template; the modules here are what the rest of psfleet calls. Read generate.py first, which loads kernels,
then hash_index.py, the index of a table, and sources/push.txt, the update of a sparse table's rows.

    generate.py, cache.py                             load, generate and cache kernels
    rule_source.py, row_format.py, rule_twin.py       kernels of a rule: text, row layouts, reference in NumPy
    hash_index.py, hashing.py, id_routing.py          the index of a sparse table; hashes and servers of ids
    dedup.py, bags.py, recent_batches.py              batches of ids and bags of rows
    initial_values.py, number_formats.py              first weights; bfloat16, float16 and int8
    text_hashing.py                                   ids of texts
    intrinsics.py, row_rounding.py                    loads, stores and rounding as code inside kernels
    device/                                           the same for a GPU

The code of the modules that kernels contain (`_HELPERS` of cache.py) and of `sources/` is part of the cache's
key: an edit of it compiles kernels again on each machine. Comments and docstrings are not part of the key.
"""
