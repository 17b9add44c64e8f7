"""Supervision of a job: its start, failures, takeovers, scaling and end.

Start with `supervisor.py`, whose head draws the state machine; `job_events.py` has its events and actions.
`standbys.py` decides about takeovers, `scaling_requests.py` about another number of servers. None of them
starts a process or reads a clock; `job_runner.py` does that.
"""
