"""When a shard is told that time has passed."""

import pytest

from psfleet.core.engine.shard.shard_state import TickTimer

pytestmark = pytest.mark.quick


def test_idle_time_does_not_count() -> None:
    """Ticks bring the time since somebody wanted them, and all of it that the shard was not told."""
    timer = TickTimer(100.0)
    assert timer.due(0.0, 160.0) == 0
    assert timer.due(0.5, 160.25) == 0
    assert timer.due(0.5, 160.5) == 0.5
    assert timer.due(0.5, 161.0) == 1.0  # it had no room for the first
    timer.mark_ticked(161.0)
    assert timer.due(0.5, 161.25) == 0
