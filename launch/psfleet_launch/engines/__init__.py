"""Where a job's processes run. `local`: on this machine."""
