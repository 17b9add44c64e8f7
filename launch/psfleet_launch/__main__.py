"""`python -m psfleet_launch` is `psfleet-launch`."""

import sys

from psfleet_launch.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
