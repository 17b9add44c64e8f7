"""Files that psfleet writes, each with a format and a version."""
