"""Connections to other processes of a job: credentials, channels, sockets, and reasons for a refusal."""
