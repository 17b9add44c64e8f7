"""Durable state of a server: its log, its files of snapshots, the records for its standby, and recovery.

Start with `log`, which defines the file format, and `recovery`, which replays a log.
"""
