"""The fleet of one process."""
