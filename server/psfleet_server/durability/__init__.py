"""Durable state of a server: log, snapshot parts and recovery."""
