"""Tables: dense arrays and rows by id, with the state that their rules keep.

Read sparse.py first, then row_memory.py and host_rows.py for the storage of rows.
"""
