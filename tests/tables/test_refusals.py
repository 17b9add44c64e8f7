"""What tables, their definitions and their entries refuse, each with a sentence that quotes the value."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from psfleet.core.engine.gradients import SparseGrad
from psfleet.core.engine.rules import ASGD, SGD, Adam, RMSProp, Slot, make_rule
from psfleet.core.engine.schema import entry
from psfleet.core.engine.schema.entry import EvictionPolicy, make_entry
from psfleet.core.engine.schema.table import InitializerSpec, TableSpec
from psfleet.core.engine.tables.dense import DenseTable
from psfleet.core.engine.tables.memory_choice import MemoryChoice
from psfleet.core.engine.tables.sparse import SparseTable
from psfleet.core.graph.parameters.parameter import Parameter
from tests.refusals import check_refusals, named

pytestmark = pytest.mark.quick


def blend(age: float, h: tuple[float, ...], frequency: float) -> float:
    return 0.5 * frequency - h[0] * age


def pair(frequency: float) -> tuple[float, float]:
    return frequency, frequency


def older(rank: float) -> float:
    return rank


def logged(age: float) -> float:
    return np.log(age)  # type: ignore[no-any-return]  # refused all the same


def rate(shows: float, clicks: float) -> float:
    return clicks / shows


@dataclass(frozen=True)
class Wrong(EvictionPolicy):
    """Its function is one of those above."""

    which: int = 0
    scale: float = 1.0
    name = "wrong"

    def score(self) -> Callable[..., float]:
        functions: list[Callable[..., float]] = [older, logged, blend, pair, rate]  # type: ignore[list-item]
        return functions[self.which]

    def scalars(self) -> tuple[float, ...]:
        return (self.scale * 1e308,)


def spec(kind: Any = "sparse", shape: Any = (16,), rule: Any = None, **options: Any) -> TableSpec:
    """A definition."""
    return TableSpec("t", kind, shape, rule or SGD(), **options)


def evicting(policy: Any) -> SparseTable:
    """A table of this policy."""
    return SparseTable(spec(shape=(2,), entry=entry.CapacityEntry(10, policy=policy)))


DEFINITIONS = """
CapacityEntry(10, policy=Wrong(0))  # RuleError: ...'wrong': the function older asks for 'rank'; it may ask
CapacityEntry(10, policy=Wrong(1))  # RuleError: ...'wrong': the function logged uses 'np.log'
CapacityEntry(10, policy=Wrong(2, 10.0))  # RuleError: ...its scalars are (inf,); they must be finite
CapacityEntry(10, policy="mru")  # RuleError: ...eviction policy 'mru' is unknown; use one of ...lfu
CapacityEntry(10, policy=DecayedFrequency(0.0))  # ConfigError: ...half_life
CapacityEntry(10, full="refuse", policy="lfu")  # that refuses has the policy LFU...; it evicts no rows
evicting(Wrong(3))  # RuleError: ...the kernels of Wrong... do not compile
evicting(Wrong(4))  # ConfigError: ...'wrong' asks for clicks, ... join its entry with a Show
TTLEntry()  # both are 0
ShowClickEntry("a:b", "c")  # 'a:b'
TTLEntry(5) & TTLEntry(6)  # TTLEntry, TTLEntry
make_entry("ttl", {"steps": 1.5, "seconds": 0.0})  # is 1.5
make_entry("ttl", {"steps": inf, "seconds": 0.0})  # is inf
make_entry("show_click", {})  # 'show_click' is unknown
make_entry("probability", {"probability": 1.0, "x": 1.0})  # has no
make_entry("lottery", {})  # 'lottery'
ProbabilityEntry(0.0)  # 0.0
ProbabilityEntry(-1.0)  # -1.0
ProbabilityEntry(1.5)  # 1.5
ProbabilityEntry(nan)  # nan
spec("dense", (3,), entry=ProbabilityEntry(0.5))  # is dense
Parameter("w", shape=(3, 2), sparse=True, entry=ProbabilityEntry(0.5))  # ShapeError: ...has all its rows
spec(precision="bf16")  # precision is 'bf16'; it must be one of float32, bfloat16
spec("dense", precision="bfloat16")  # is dense, and dense tables are float32
spec(precision="bfloat16", rule=make_rule("exact_sum", {}))  # counts exactly, in float32
spec(precision="bfloat16/bfloat16", rule=ASGD(2))  # the state of 'asgd' cannot be rounded; use precision='bfloat16'
Slot("m", smallest="bf16")  # RuleError: ...slot 'm' has smallest='bf16'; it must be one of float32, bf
spec("dense", (4,), device="gpu")  # device is 'gpu'; it must be cpu or cuda
MemoryChoice().kind_for(spec("dense", (4,), device="cuda"))  # table 't' asks for device='cuda', but this process
InitializerSpec("normal", 0.0, -2.0)  # 'normal' has the deviation -2.0
InitializerSpec("truncated", 0.0, -1.0)  # the deviation -1.0
InitializerSpec("uniform", 0.0, nan)  # the values 0.0 and nan
InitializerSpec("constant", inf, 0.0)  # the values inf
InitializerSpec("zipf", 0.0, 1.0)  # 'zipf' is unknown
SparseGrad(np.array([1]), np.ones((1, 2), np.float32), np.ones((1, 3), np.float32))  # ShapeError: ...scores (1, 3)
SparseTable(spec(), max_rows=0)  # UsageError: ...max_rows is 0
"""
ARRAYS = """
rows.restore(np.zeros(2, np.int64), np.zeros((2, 4), np.int32))  # ShapeError: ...(2, 4)
dense.restore(1, [np.zeros(4, np.float32)])  # ShapeError: ...its state is 3 arrays
"""
NAMES = vars(entry) | {"np": np, "inf": math.inf, "nan": math.nan}
NAMES |= named(Wrong, evicting, spec, make_entry, Parameter, make_rule, ASGD, Slot)
NAMES |= named(MemoryChoice, SparseGrad, InitializerSpec, SparseTable)


def test_definitions() -> None:
    """Entries, policies, precisions, devices and first values that make no sense."""
    check_refusals(DEFINITIONS, NAMES)


def test_arrays() -> None:
    """A state of another shape or dtype is refused and changes nothing."""
    dense = DenseTable(spec("dense", (4,), Adam()), np.zeros(4, np.float32))
    rows = SparseTable(spec(shape=(4,)))
    check_refusals(ARRAYS, {"rows": rows, "dense": dense, "np": np})
    assert dense.step == rows.step == 0


def test_a_rule_may_round_a_part_of_its_state() -> None:
    """What a rule can do without is no reason to refuse a precision, nor is a device."""
    made = spec(rule=Adam(), precision="bfloat16/bfloat16")
    for change in ({"device": "cuda"}, {"rule": RMSProp(centered=True), "every_row": True}):
        replace(made, **change)
