"""Console output of the launcher while a job runs, and when it fails."""
