"""Connections to other processes of a job: credentials, channels, sockets, and what is wrong with one."""
