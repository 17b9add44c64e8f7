"""Engines: each file with an `ENGINE` is one way to run a job's processes; `local` is this machine."""
