"""Launcher: starts the processes of a job on one or several machines, watches them and ends them.

`job_runner.py` is the main loop. It connects the state machine (`supervision/`) with the processes
(`engines/`). `commands/` has the command lines, `job/` the settings and plan of a job, `agent/` the process
that runs members on other machines, `console/` and `observability/` what users see, and `chaos/` the
injection of faults.
"""
