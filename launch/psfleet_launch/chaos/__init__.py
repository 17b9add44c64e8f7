"""Faults that a job meets on purpose, and what it has shown of its promises."""
