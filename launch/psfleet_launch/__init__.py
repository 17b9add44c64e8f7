"""The launcher: starts the processes of a job on this machine, watches them and ends them."""
