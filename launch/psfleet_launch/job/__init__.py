"""What a job is made of: its processes, folder, snapshots and guard."""
