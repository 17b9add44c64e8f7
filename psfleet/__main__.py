"""`python -m psfleet`: the command psfleet."""

import runpy

runpy.run_module("psfleet_launch.commands.psfleet_cli", run_name="__main__")
