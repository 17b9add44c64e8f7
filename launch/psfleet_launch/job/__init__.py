"""A job: its settings, processes and folders.

`job_request.py` has the settings. `job_plan.py` computes from them the processes with their commands and
environment variables, and `spawn.py` starts the processes. `guard.py` kills them if the launcher is killed.
"""
