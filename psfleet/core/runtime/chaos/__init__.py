"""Chaos in a job's processes under `psfleet-launch --chaos`: injected faults, and the audit of pushes."""
