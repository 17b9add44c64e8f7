"""What a process is told from outside: its environment, limits and durations."""
