"""Storage of tables: dense arrays, and sparse rows by id, each with the state of its optimizer rule.

Read sparse.py first, then row_memory.py and host_rows.py for the storage of rows.
"""
