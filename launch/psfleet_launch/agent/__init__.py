"""The agent: one process per machine, which runs processes of a job for a launcher elsewhere."""
