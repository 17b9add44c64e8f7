"""The graph of operations: variables, records of operations, backward passes, programs and their runs."""
