"""Where a job's processes run: each file with an `ENGINE` is one engine, `local` is this machine."""
