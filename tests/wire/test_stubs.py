"""The .proto files say what they mean."""

import itertools
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_field_has_a_comment() -> None:
    """Each message, field, value, service and method of the .proto files has a comment above it."""
    for path in (ROOT / "protos").rglob("*.proto"):
        lines = [line.strip() for line in path.read_text().splitlines()]
        for above, line in itertools.pairwise(lines):
            plain = line.startswith(("//", "syntax", "package", "import", "}")) or not line
            assert plain or above.startswith("//"), f"{path.name}: {line!r} has no comment"
