"""Consistency modes as they are asked for: by script, file and flag."""

import json
from pathlib import Path
from typing import Any

import pytest

from psfleet.core.base.errors import ConfigError
from psfleet.core.runtime.strategy import ConsistencySettings, DistributedStrategy, resolve
from psfleet_launch.commands.options import merged
from tests.refusals import check_refusals

MERGED = ConsistencySettings("half-async", max_merge=20, queue_size=40)


@pytest.mark.parametrize(
    ("a_sync", "configs", "expected"),
    [
        (False, {}, ConsistencySettings("sync")),
        (True, {}, ConsistencySettings("async")),
        (True, {"k_steps": 0}, ConsistencySettings("async")),
        (True, {"k_steps": -1}, ConsistencySettings("sync")),
        (True, {"k_steps": 100}, ConsistencySettings("geo", k_steps=100)),
        (True, {"max_merge_var_num": 1}, ConsistencySettings("async")),
        (True, {"max_merge_var_num": 20, "send_queue_size": 40}, MERGED),
        (True, {"staleness": 0}, ConsistencySettings("ssp", staleness=0)),
    ],
)
def test_the_references_settings(
    a_sync: bool, configs: dict[str, Any], expected: ConsistencySettings
) -> None:
    """a_sync and its configurations name the mode that the reference would run."""
    strategy = DistributedStrategy(a_sync=a_sync, a_sync_configs=configs)
    assert resolve(strategy, "").consistency == expected


REFUSED = """
script(speed=3)  # ConfigError: ...no setting 'speed'
script(delay_compensation=1.0)  # ConfigError: ...no setting 'delay_compensation'
script(thread_pool_size=2)  # ConfigError: ...thread_pool_size has no meaning here
script(k_steps=2.5)  # ConfigError: ...2.5; it must be a whole number
script(k_steps=-2)  # ConfigError: ...k_steps is -2
script(k_steps=5, max_merge_var_num=3)  # ConfigError: ...k_steps and max_merge_var_num contradict
script(k_steps=5, staleness=3)  # ConfigError: ...k_steps and staleness contradict
script(send_queue_size=3)  # ConfigError: ...send_queue_size is 3 and max_merge_var_num is 1
script(False, k_steps=5)  # ConfigError: ...k_steps = 5 asks for a mode that is not sync
script(staleness=-1)  # ConfigError: ...staleness is -1; it must be at least 0
file(mode="often")  # ConfigError: ...'often'; it must be sync, async, ssp, geo or half-async
file(mode="async", staleness=3)  # ConfigError: ...staleness = 3 and mode = 'async' contradict
file(mode="async", staleness_damping=0.5)  # ConfigError: ...no setting 'staleness_damping'
file(mode="geo", max_merge=3)  # ConfigError: ...it is a setting of half-async
file(mode="geo", k_steps=0)  # ConfigError: ...k_steps is 0; it must be at least 1"""


def test_what_is_refused() -> None:
    """Unknown and contradictory settings, in a script or in a file, are one sentence that quotes them."""

    def script(a_sync: bool = True, **configs: Any) -> None:
        resolve(DistributedStrategy(a_sync=a_sync, a_sync_configs=configs), "")

    def file(**settings: Any) -> None:
        resolve(None, json.dumps({"consistency": settings}))

    check_refusals(REFUSED, {"script": script, "file": file})


def test_a_mode_takes_its_settings_with_it(tmp_path: Path) -> None:
    """Flags go before the file and that before the script; who replaces a mode replaces its settings,
    who names a setting only changes that. Flags for a setting need a mode that a flag or file names."""
    script = DistributedStrategy(a_sync=True, a_sync_configs={"k_steps": 7})
    assert resolve(script, json.dumps({"consistency": {"mode": "sync"}})).consistency.mode == "sync"
    file = tmp_path / "strategy.toml"
    file.write_text("[consistency]\nmode = 'ssp'\nstaleness = 4\n")
    cases: list[tuple[dict[str, Any], ConsistencySettings]] = [
        ({}, ConsistencySettings("ssp", 4)),
        ({"staleness": 1}, ConsistencySettings("ssp", 1)),
        ({"mode": "async"}, ConsistencySettings("async")),
        ({"mode": "geo", "k_steps": 3}, ConsistencySettings("geo", k_steps=3)),
    ]
    for flags, expected in cases:
        launcher = json.dumps(merged({"consistency": flags}, file=str(file)))
        assert resolve(script, launcher).consistency == expected
    assert resolve(script, '{"consistency": {"k_steps": 9}}').consistency.k_steps == 9
    (tmp_path / "other.toml").write_text("[lamb]\n")
    with pytest.raises(ConfigError, match="--k-steps is 9, a setting of the consistency mode geo"):
        merged({"consistency": {"k_steps": 9}}, file=str(tmp_path / "other.toml"))
    for named in (None, str(file)):
        with pytest.raises(ConfigError, match="k_steps = 3 and mode = 'ssp' contradict"):
            merged({"consistency": {"mode": "ssp", "k_steps": 3}}, file=named)
