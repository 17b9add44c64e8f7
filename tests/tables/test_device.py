"""The choice of a device for a table. Tables on one: tests/kernels/test_cuda.py."""

import pytest

from psfleet.errors import ConfigError
from psfleet.rules import SGD
from psfleet.schema.table import TableSpec
from psfleet.tables.devices import DeviceChoice


def test_a_table_made_before_comes_back_in_host_memory() -> None:
    """A process without a GPU refuses a new table that names one, and keeps one of a log on the CPU."""
    choice, spec = DeviceChoice(), TableSpec("w", "dense", (4,), SGD(), device="cuda")
    with pytest.raises(ConfigError, match="table 'w' asks for device='cuda', but this process"):
        choice.of(spec)
    assert choice.of(spec, may_refuse=False) == "cpu"


def test_an_unknown_device_is_refused() -> None:
    """The sentence quotes it."""
    with pytest.raises(ConfigError, match="table 'w': device is 'gpu'; it must be cpu or cuda"):
        TableSpec("w", "dense", (4,), SGD(), device="gpu")  # type: ignore[arg-type]
