"""Supervision of a job: its start, failures, takeovers, scaling and end.

Read `supervisor.py` first. Its docstring has a diagram of the state machine. `job_events.py` has the events
and actions. `standbys.py` decides about takeovers, and `scaling_requests.py` handles changes of the number
of servers. These modules start no process and read no clock; `job_runner.py` does both.
"""
