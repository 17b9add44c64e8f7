"""Parts of a job: its settings, processes, folders and guard.

`job_request.py` has the settings. `job_plan.py` turns them into members, commands and environments, and
`spawn.py` starts the processes.
"""
