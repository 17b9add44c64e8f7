"""Definitions of tables, the same on every server and worker. Read table.py first."""
