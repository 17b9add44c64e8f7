"""A fleet for tests: real servers on this machine, and faults by name and seed."""
