"""Snapshots of the whole fleet, which server 0 coordinates while training continues.

Start with `snapshot_coordinator`, the pure state machine. `snapshot_runner` performs its instructions on disk
and on the other servers, `snapshot_schedule` requests snapshots at intervals, and `snapshot_news` notifies
workers.
"""
