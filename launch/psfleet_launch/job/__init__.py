"""Parts of a job: its processes, folder, snapshots and guard."""
