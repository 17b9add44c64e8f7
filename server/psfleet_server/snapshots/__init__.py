"""Snapshots of the whole fleet, coordinated by server 0."""
