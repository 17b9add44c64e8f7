"""Durable state of a server: its log, its parts of snapshots, its standby's records, and recovery.

Start with `log`, the file format, and `recovery`, which replays a log.
"""
