"""Launcher: starts the processes of a job on one or several machines, watches them and ends them.

`job_runner.py` is the main loop. It connects the state machine that decides (`supervision/`) with the code
that starts processes (`engines/`). The other packages:

- `commands/`: the command lines `psfleet-launch` and `psfleet`. `launch_command.py` puts a job together and
  does what follows its end: the exit code, the failure message and the report.
- `job/`: settings of a job, and its processes and folders.
- `agent/`: the program that runs processes on other machines.
- `console/`, `observability/`: output in the terminal, metrics, the page and the report.
- `chaos/`: injection of faults.
"""
