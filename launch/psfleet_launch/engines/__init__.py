"""Engines: each module with an `ENGINE` is one way to run a job's processes, chosen by `--engine`.

Start with `launch_engine.py`, the interface, and `local.py`, which runs processes on this machine.
`remote/` has the common parts of engines for several machines.
"""
