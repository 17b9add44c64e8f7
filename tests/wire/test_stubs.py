"""The generated stubs are those of the .proto files."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_stubs_are_fresh() -> None:
    """tools/generate_stubs.py --check finds nothing to do."""
    pytest.importorskip("grpc_tools", reason="grpcio-tools is in the extra dev")
    check = subprocess.run(
        [sys.executable, "-W", "ignore", ROOT / "tools" / "generate_stubs.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert check.returncode == 0, check.stderr


def test_every_field_has_a_comment() -> None:
    """Each message, field, value, service and method of the .proto files has a comment above it."""
    for path in (ROOT / "protos").rglob("*.proto"):
        lines = [line.strip() for line in path.read_text().splitlines()]
        for above, line in itertools.pairwise(lines):
            plain = line.startswith(("//", "syntax", "package", "import", "}")) or not line
            assert plain or above.startswith("//"), f"{path.name}: {line!r} has no comment"
