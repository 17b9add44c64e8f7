"""How a job starts, fails and ends. Pure."""
