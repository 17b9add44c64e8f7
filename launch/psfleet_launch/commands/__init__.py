"""Commands of the command line: `psfleet-launch` and the subcommands of `psfleet`."""
