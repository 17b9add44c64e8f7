"""Names of the files by which a mode is wished for from outside a job, in the folder of its logs."""

__all__ = ["DONE", "WISH"]

WISH = "mode.json"
"""What is wanted: `{"number": 1, "consistency": {"mode": "ssp", "staleness": 4}}`; numbers grow."""

DONE = "mode.told"
"""Number of the last wish that the workers have been told of."""
