"""Engines: ways to run the processes of a job, chosen with `--engine`. An engine is a module that defines
`ENGINE`.

Read `launch_engine.py`, the interface, and `local.py`, which runs processes on this machine, first.
`remote/` has the common parts of engines for several machines.
"""
