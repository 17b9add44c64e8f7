"""Fault injection of `psfleet-launch --chaos SEED`, and the report of the promises that the job kept.

- `fault_schedule.py` decides which process is killed, paused or cut off, and when.
- `follower_processes.py` starts followers and injects faults into them.
- `injection.py` runs inside workers and servers. It delays calls, simulates full disks, and counts every push
  in a hidden table (the audit). `message_faults.py` decides which replies get lost and which calls repeat.
- `audit.py` has the files in which workers record their pushes.
- `report.py` compares these files with the counts of the servers after the job.

Read docs/chaos.md first, then `fault_schedule.py`.
"""
