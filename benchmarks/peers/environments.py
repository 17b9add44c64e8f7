"""Virtual environments for the frameworks that need other versions of NumPy and protobuf than psfleet.

    python benchmarks/peers/environments.py     # creates them; `make bench-peers` does it too

Each takes about a gigabyte, in benchmarks/peers/.venv, which git ignores.
"""

import subprocess
import sys
import venv
from pathlib import Path

__all__ = ["PEERS", "interpreter", "unmade"]

_HERE = Path(__file__).resolve().parent
PEERS = ("tensorflow", "paddle")


def interpreter(peer: str) -> Path:
    """Return the path of the Python in a framework's environment."""
    return _HERE / ".venv" / peer / "bin" / "python"


def unmade(peer: str) -> str | None:
    """Return the reason for which a framework's environment cannot be used, or None."""
    made = _made(peer)
    if not made.exists():
        return "no environment; `make bench-peers` makes it"
    if made.read_text() != _requirements(peer).read_text():
        return "its environment is of other versions; `make bench-peers` makes it again"
    return None


def make(peer: str) -> None:
    """Create the environment of a framework.

    Raises:
        subprocess.CalledProcessError: pip could not install the requirements.
    """
    folder = interpreter(peer).parent.parent
    print(f"installing {peer} into {folder} (a few minutes)", flush=True)
    venv.create(folder, clear=True)
    # psfleet's own pip installs for that Python: some systems cannot put a pip into a new environment.
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    aim = ["--python", str(interpreter(peer)), "install", "--no-deps"]
    subprocess.run([*pip, *aim, "--requirement", str(_requirements(peer))], check=True)
    _made(peer).write_text(_requirements(peer).read_text())


def _requirements(peer: str) -> Path:
    return _HERE / "requirements" / f"{peer}.txt"


def _made(peer: str) -> Path:
    """Return the path of a file that is written after the installation, with the installed requirements."""
    return interpreter(peer).parent.parent / "made.txt"


def main() -> int:
    failed = 0
    for peer in filter(unmade, PEERS):
        try:
            make(peer)
        except subprocess.CalledProcessError:
            print(f"{peer} cannot be installed here; benchmarks leave it out", file=sys.stderr)
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
