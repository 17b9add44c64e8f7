"""Definitions of tables, equal wherever a part of a table lives. Read table.py first."""
