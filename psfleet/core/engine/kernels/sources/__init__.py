"""Sources of kernels. `psfleet.core.engine.kernels.generate` reads and compiles them; no module imports them.

A .py file is compiled as it is, or with the value of its constant DIM replaced. A .txt file is a
`string.Template`, into which the code of a rule or policy is inserted. Read index.py, then push.txt first.

    index.py, index_removal.py      index of a sparse table: find, add, list; count, remove, decay
    rows_head.txt + push.txt        update the rows of a batch by a rule
    rows_head.txt + rest*.txt       update the rows that a batch does not name
    pull.txt                        read rows
    dense.txt                       update a dense array by a rule
    eviction.txt                    rank rows by a policy's score, count their uses
    dedup.py                        distinct ids of a batch
    row_sums.py, bag_rows.py        rows and gradients between distinct ids, batch and bags
    chosen_bags.py                  copy selected bags of a dataset
    row_weights.py                  initial values, rounding of weights
    halves.py, int8.py              16 and 8 bits
    freezing.py, disk_rows.py       snapshots while training goes on; rows in a file
    plain_call.py                   fast path of a server for small calls
    served_index.py                 index of a served table
    text_numbers.py                 hashes of texts
    arrays.py                       copy past the caches, sum of squares

Conventions of all sources:

- Arguments are addresses as int64 unless a docstring says otherwise. Nothing is checked: the caller passes
  arrays that are long enough, and keeps them alive.
- Addresses may have any alignment. `read_*` is for memory that does not change while the kernel runs, and
  `load_*` for memory that the kernel may also write.
- No fastmath: each float32 operation is rounded in the order in which it is written (decision 1).
- Kernels release the GIL, except those of plain_call.py, and take no lock: a table has one caller at a time.
- A loop over ids in random order prefetches the memory of the id that is AHEAD places further on, so that
  cache misses overlap.
- `hash_` is the hash of an id (`mix`), and `d` the address of the descriptor of a table's index
  (hash_index.py).
"""
