"""The choice of a device for a table. Tables on one: tests/kernels/test_cuda.py."""

from typing import Literal

import pytest

from psfleet.core.engine.rules import SGD
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.tables.memory_choice import MemoryChoice


def test_a_table_made_before_comes_back_in_host_memory() -> None:
    """A process without a GPU keeps a table of a log that names one on the CPU."""
    choice, spec = MemoryChoice(), TableSpec("w", "dense", (4,), SGD(), device="cuda")
    assert choice.of(spec, may_refuse=False).name == "cpu"


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_the_setting_is_for_every_table_that_names_none(kind: Literal["dense", "sparse"]) -> None:
    """A server that is told cuda holds dense and sparse tables there, but not those that name the CPU."""
    choice = MemoryChoice("cuda", has_devices=True)
    assert choice.of(TableSpec("w", kind, (4,), SGD())).name == "cuda"
    assert choice.of(TableSpec("w", kind, (4,), SGD(), device="cpu")).name == "cpu"
