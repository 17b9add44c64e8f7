"""What a server writes, and how it becomes what it was: log, snapshot parts and recovery."""
