"""Supervision of a job: its start, failures and end. Pure."""
