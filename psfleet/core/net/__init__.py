"""The wire: what travels between a worker and a server, and how it is written and read."""
