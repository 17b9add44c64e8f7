"""How often servers have died at which point."""

import os
from collections import Counter
from typing import Any


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """With PSFLEET_TORTURE: the deaths of all tests that have passed, by what they trained and where."""
    if not os.environ.get("PSFLEET_TORTURE"):
        return
    seen: dict[str, Counter[str]] = {}
    for report in terminalreporter.getreports("passed"):
        for name, points in report.user_properties:
            if name.startswith("deaths"):
                seen.setdefault(name, Counter()).update(point.split(":")[0] for point in points)
    for name, counts in sorted(seen.items()):
        each = ", ".join(f"{point} {count}" for point, count in counts.most_common())
        terminalreporter.write_line(f"{name}: {counts.total()} ({each})")
