"""Runs every benchmark, one after the other. `make bench` runs it with `--short`, in under 5 minutes.

The figures are also written to benchmarks/results/NAME.json.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

from processes import environment

HERE = Path(__file__).resolve().parent
SCRIPTS = ("kernels", "growth", "startup", "w1_sparse", "w2_dense", "w3_ctr")
FLAGS = ("--short", "--no-peers", "--all-peers")  # what every script knows, and this one passes on


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    for flag in FLAGS:
        parser.add_argument(flag, action="store_true")
    parser.add_argument("scripts", nargs="*", default=SCRIPTS, help=", ".join(SCRIPTS))
    options = parser.parse_args()
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    flags = [flag for flag in FLAGS if getattr(options, flag[2:].replace("-", "_"))]
    failed = [name for name in options.scripts if _run(name, flags, results)]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _run(name: str, flags: list[str], results: Path) -> int:
    start = time.monotonic()
    command = [
        sys.executable,
        str(HERE / f"{name}.py"),
        *flags,
        "--json",
        str(results / f"{name}.json"),
    ]
    code = subprocess.run(command, env=environment(), check=False).returncode
    print(f"({name}: {time.monotonic() - start:.0f} s)", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
