"""AUC and speed of examples/frappe.py in every mode, on servers and embedded: the table of docs/proofs.md.

python benchmarks/proofs.py --data .data/frappe
python benchmarks/proofs.py --data .data/frappe --models fm --interfaces torch --ways ssp int8
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "frappe.py"
CLUSTER = ["--servers", "2", "--workers", "2"]
WAYS = {
    "embedded": [],
    "sync": [*CLUSTER, "--sync"],
    "async": [*CLUSTER, "--async"],
    "ssp": [*CLUSTER, "--mode", "ssp"],
    "sync int8": [*CLUSTER, "--sync", "--wire", "int8"],
    "async int8": [*CLUSTER, "--async", "--wire", "int8"],
}
INTERFACES = {"program": [], "torch": ["--torch"]}


def row(model: str, interface: str, way: str, data: Path) -> str:
    """Return a line of the table: train, and read the scores that the example prints."""
    with tempfile.TemporaryDirectory() as folder:
        job = WAYS[way] and ["-m", "psfleet_launch", "--no-progress", *WAYS[way]]
        process = subprocess.run(
            [
                *(sys.executable, *job, str(EXAMPLE), "--model", model, "--data", str(data)),
                *INTERFACES[interface],
            ],
            cwd=folder,
            text=True,
            capture_output=True,
            check=False,
        )
    if process.returncode:
        return f"| {model} | {interface} | {way} | failed: {process.stderr.strip()[-200:]} | | |"
    scores = dict(re.findall(r"(validation|test) AUC ([\d.]+)", process.stdout))
    (pace,) = re.findall(r"([\d,]+) samples/s", process.stdout)
    return f"| {model} | {interface} | {way} | {scores['test']} | {scores['validation']} | {pace} |"


def main() -> None:
    """Print the table, with a line after each run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the example's files")
    parser.add_argument("--models", nargs="+", default=["lr", "fm", "deepfm"])
    parser.add_argument("--interfaces", nargs="+", choices=INTERFACES, default=[*INTERFACES])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS])
    options = parser.parse_args()
    print("| model | interface | way | test AUC | validation AUC | samples/s |")
    print("|---|---|---|---|---|---|")
    for model in options.models:
        for interface in options.interfaces:
            for way in options.ways:
                print(row(model, interface, way, options.data.resolve()), flush=True)


if __name__ == "__main__":
    main()
