"""The strategy part wire: how it is said, who has the last word, what it does not go with."""

from pathlib import Path

import numpy as np
import pytest

import psfleet
from psfleet.core.base.errors import ConfigError
from psfleet.core.runtime.strategy import DistributedStrategy, WireSettings, resolve
from psfleet_launch.commands.options import merged


def test_a_form_for_both_ways() -> None:
    """A strategy names one form; its configs may name another for either way."""
    strategy = DistributedStrategy(wire="int8")
    assert resolve(strategy, "").wire == WireSettings("int8", "int8")
    strategy.wire_configs = {"pull": "bf16"}
    assert resolve(strategy, "").wire == WireSettings("int8", "bf16")
    assert resolve(DistributedStrategy(), "").wire is None


def test_the_launcher_has_the_last_word(tmp_path: Path) -> None:
    """--wire goes before a strategy file, which goes before the script; each way by itself."""
    file = tmp_path / "strategy.toml"
    file.write_text('[wire]\npull = "bf16"\n')
    message = merged({}, file=str(file))
    assert message["wire"] == {"pull": "bf16"}
    assert merged({"wire": {"push": "fp32", "pull": "fp32"}}, file=str(file))["wire"] == {
        "push": "fp32",
        "pull": "fp32",
    }
    actual = resolve(DistributedStrategy(wire="int8"), '{"wire": {"pull": "bf16"}}')
    assert actual.wire == WireSettings("int8", "bf16")


def test_a_strategy_wants_the_name_of_a_form() -> None:
    """A switch, as other parts have, is refused when it is set; a name at the latest before connecting."""
    with pytest.raises(ConfigError, match=r"wire is True; it must be a str"):
        DistributedStrategy(wire=True)
    with pytest.raises(ConfigError, match="int4"):
        resolve(DistributedStrategy(wire="int4"), "")


def test_plain_tables_have_it_too() -> None:
    """psfleet.connect(wire=...) rounds what is pulled and pushed, without a cluster as with one."""
    psfleet.reset()
    with psfleet.connect(wire="bf16") as ps:
        table = ps.dense_table("w", np.zeros(3), psfleet.optimizer.SGD(1.0))
        table.push(np.array([1 + 2.0**-12, 2.0**-30, 3]))
        assert table.pull().tolist() == [-1, -(2.0**-30), -3]
    with pytest.raises(ConfigError, match="int4"):
        psfleet.connect(wire="int4")
