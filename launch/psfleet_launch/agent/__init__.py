"""Agent: the process on each machine that runs a job's processes for a launcher on another machine.

Read `agent.py` first. The messages between launcher and agent are in `engines/remote/agent_messages.py`.
`machine_checks.py` has the checks of `psfleet doctor`.
"""
