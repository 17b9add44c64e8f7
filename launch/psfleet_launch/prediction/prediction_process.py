"""One process of `psfleet predict`: python -m psfleet_launch.prediction.prediction_process JOB"""

import json
import sys

from psfleet.errors import PsfleetError
from psfleet.rules import import_rules
from psfleet.settings.environment import read_environment
from psfleet_launch.prediction.prediction_job import PredictionJob


def main(text: str) -> int:
    """Do this process's part of the job, given as JSON; its exit code."""
    try:
        import_rules(read_environment().rules)  # snapshots refer to them
        PredictionJob(**json.loads(text)).run()
    except (PsfleetError, OSError) as error:
        print(f"psfleet: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
