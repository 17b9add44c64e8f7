"""Compiled kernels: distinct ids and bags of a batch, initial values, updates of arrays and rows.

A kernel is a loop over a batch that numba compiles to machine code. The source of kernels is in `sources/`;
the modules here load the kernels and are what the rest of psfleet calls. Read generate.py first, which loads
kernels, then hash_index.py, the index of a table, and sources/push.txt, the update of a sparse table's rows.

    generate.py, cache.py                             load, generate and cache kernels
    rule_source.py, row_format.py, rule_twin.py       kernels of a rule: text, row layouts, reference in NumPy
    hash_index.py, hashing.py, id_routing.py          the index of a sparse table; hashes and servers of ids
    dedup.py, bags.py, recent_batches.py              batches of ids and bags of rows
    initial_values.py, number_formats.py              initial weights; bfloat16, float16 and int8
    text_hashing.py                                   ids of texts
    intrinsics.py, row_rounding.py                    loads, stores and rounding as code inside kernels
    device/                                           the same for a GPU

An edit of code in `sources/`, or in a module that kernels contain (`_HELPERS` of cache.py), changes the
cache's key, so each machine compiles kernels again. Comments and docstrings are not part of the key.
"""
