"""The choice of a device for a table. Tables on one: tests/kernels/test_cuda.py."""

import dataclasses
from typing import Literal

import pytest

from psfleet.core.base.errors import ConfigError
from psfleet.core.engine.rules import SGD, Adam
from psfleet.core.engine.schema.entry import CapacityEntry
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.tables.memory_choice import MemoryChoice

pytestmark = pytest.mark.quick


def test_a_table_made_before_comes_back_in_host_memory() -> None:
    """A process without a GPU keeps a table of a log that names one on the CPU."""
    choice, spec = MemoryChoice(), TableSpec("w", "dense", (4,), SGD(), device="cuda")
    assert choice.kind_for(spec, may_refuse=False).name == "cpu"


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_the_setting_is_for_every_table_that_names_none(kind: Literal["dense", "sparse"]) -> None:
    """A server that is told cuda holds dense and sparse tables there, but not those that name the CPU."""
    choice = MemoryChoice("cuda", has_devices=True)
    assert choice.kind_for(TableSpec("w", kind, (4,), SGD())).name == "cuda"
    assert choice.kind_for(TableSpec("w", kind, (4,), SGD(), device="cpu")).name == "cpu"


_SCORED = TableSpec("w", "sparse", (4,), SGD(), entry=CapacityEntry(10, policy="lfu"))
_CODED = TableSpec("w", "sparse", (16,), Adam(), precision="bfloat16/int8")


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (_SCORED, "its eviction policy 'lfu' ranks rows by a score"),
        (_CODED, "its precision 'bfloat16/int8' keeps state in 8 bits"),
    ],
    ids=["score", "8 bits"],
)
def test_what_no_gpu_holds_is_in_host_memory_or_refused(spec: TableSpec, why: str) -> None:
    """Under auto, and if it was made before, it is in host memory; refused where the setting or the table
    says cuda. Where the column would not be smaller in 8 bits, it is not, and goes to the GPU."""
    cuda, auto = (MemoryChoice("cuda", has_devices=True, is_auto=auto) for auto in (False, True))
    asked = dataclasses.replace(spec, device="cuda")
    assert [choice.kind_for(spec, False).name for choice in (cuda, auto)] == ["cpu", "cpu"]
    assert [auto.kind_for(spec).name, cuda.kind_for(asked, False).name] == ["cpu", "cpu"]
    with pytest.raises(ConfigError, match=f"{why}.*; give it device='cpu', or say --device auto"):
        cuda.kind_for(spec)
    for choice in (cuda, auto):
        with pytest.raises(ConfigError, match=f"asks for device='cuda', but {why}.*device='cpu'"):
            choice.kind_for(asked)
    plain = TableSpec("w", "sparse", (4,), Adam(), precision="bfloat16/bfloat16")
    lru = dataclasses.replace(_SCORED, entry=CapacityEntry(10))
    narrow = TableSpec("w", "sparse", (4,), SGD(), precision="bfloat16/int8")
    assert {cuda.kind_for(one).name for one in (plain, lru, narrow)} == {"cuda"}
