"""Fault injection of `psfleet-launch --chaos SEED`, and the report of the promises that the job kept.

`fault_schedule.py` decides which process is killed, paused or cut off, and when; `follower_processes.py` does
the same to followers. `injection.py` runs inside workers and servers: it loses replies, fills disks and
counts every push in a hidden table. These processes write what they have seen to files (`audit.py`), which
`report.py` compares. Start with docs/chaos.md, then `fault_schedule.py`.
"""
