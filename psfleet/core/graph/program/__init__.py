"""The graph of operations: variables, records, backward passes, programs and their executor."""
