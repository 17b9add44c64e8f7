"""Agent: the process on each machine that runs a job's processes for a launcher elsewhere.

Start with `agent.py`. The messages are in `engines/remote/agent_messages.py`, since the launcher uses them
too. `machine_checks.py` is `psfleet doctor`.
"""
