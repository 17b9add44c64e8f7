"""Definitions of tables: everything that must be equal wherever a part of a table lives. Start with
table.py."""
