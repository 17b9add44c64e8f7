"""Writes the golden files of the formats that psfleet.core.base.json_documents guards: one small file of
each kind.

    python -m tests.checkpoint.goldens              (make goldens: those that are not there)

A folder that exists is left alone: golden files of a version are written once, and every later psfleet reads
them or names the version that can. tests/checkpoint/test_goldens.py builds the same content and compares.
"""

import contextlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import psfleet as ps
from psfleet import fluid, layers
from psfleet.checkpoint import (
    CutPosition,
    DeltaBase,
    Manifest,
    SnapshotDraft,
    export,
    linked,
    write_frozen,
)
from psfleet.core.base.job_files import write_ready, write_reply, write_request
from psfleet.core.engine.consistency import find_mode
from psfleet.core.engine.rules import RULES
from psfleet.core.engine.rules.adagrad import Adagrad
from psfleet.core.engine.rules.adam import Adam
from psfleet.core.engine.runtime_interface import Gradient
from psfleet.core.engine.schema.entry import (
    CapacityEntry,
    CountFilterEntry,
    ShowClickEntry,
    TTLEntry,
)
from psfleet.core.engine.schema.table import DecaySpec, InitializerSpec, TableSpec
from psfleet.core.engine.shard.events import Join, Push
from psfleet.core.engine.shard.shard import Shard
from psfleet.core.engine.shard.snapshot_cuts import PendingCut
from psfleet.core.engine.shard.table_placement import dense_range, owned_rows
from psfleet.core.engine.worker_state import PLACE, LoopPosition, WorkerState
from psfleet.core.graph.execution.inference import save_inference
from psfleet.core.graph.program.names import guard as names_guard
from psfleet.core.graph.program.operation import Op
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from psfleet.core.runtime.process_runtime import current
from psfleet.optimizer.lr import StepDecay
from psfleet_launch.chaos.audit import HELD, AuditedRow, AuditFile

_FORMATS = Path(__file__).parents[1] / "goldens" / "formats"
VERSION, VERSION_2 = (_FORMATS / version / "checkpoint" for version in ("v1", "v2"))
VERSION_3, GROUPS_3 = (_FORMATS / "v3" / part for part in ("checkpoint", "groups"))
"""The snapshots of VERSION and of VERSION_2 with the state of a server in its version 2."""
_ENTRY = (
    CountFilterEntry(2, candidates=64)
    & ShowClickEntry("shows", "clicks")
    & TTLEntry(steps=1000)
    & CapacityEntry(rows=256)
)
SPECS = (
    TableSpec("dense", "dense", (5, 3), Adam(), DecaySpec(l2=0.125)),
    TableSpec(
        "admitted",
        "sparse",
        (2,),
        Adagrad(),
        DecaySpec(l1=0.5),
        InitializerSpec("normal", 0.0, 0.25),
        seed=6,
        entry=_ENTRY,
    ),
    TableSpec("plain", "sparse", (2,), Adam(), seed=5, every_row=True),
)
_GROUPED = tuple(
    replace(spec, servers=servers, first=first)
    for spec, servers, first in zip(SPECS, (1, 1, None), (0, 3, 0), strict=True)
)


def shards(pushes: int, servers: int = 2, specs: Sequence[TableSpec] = SPECS) -> list[Shard]:
    """A fleet of two workers after some pushes of worker 0; one of table `plain` loses rows at the end."""
    fleet = [Shard(index, servers, workers=2) for index in range(servers)]
    for shard in fleet:
        for worker in range(2):
            shard.handle(Join(worker, 7, find_mode("async")), "join")
        for spec in specs:
            low, high = dense_range(spec, shard.index, servers) if spec.kind == "dense" else (0, 0)
            shard.create(spec, np.arange(low, high, dtype=np.float32))
    for number in range(1, pushes + 1):
        push(fleet, number)
    return fleet


def push(fleet: list[Shard], number: int) -> None:
    """The number-th push of worker 0."""
    dice = np.random.default_rng(number)
    ids = np.unique(dice.integers(-4, 4, 5))
    dense = dice.standard_normal(15, np.float32)
    rows = [
        np.abs(dice.standard_normal((len(ids), spec.push_width), np.float32)) for spec in SPECS[1:]
    ]
    for shard in fleet:
        weights, *others = specs = [table.spec for table in shard.tables.values()]
        low, high = dense_range(weights, shard.index, shard.servers)
        owned = [owned_rows(spec, ids, shard.index, shard.servers) for spec in specs]
        gradients = [Gradient(weights.key, dense[low:high], None, 0.1)]
        gradients += [
            Gradient(spec.key, values[mine], ids[mine], 0.1)
            for spec, values, mine in zip(others, rows, owned[1:], strict=True)
        ]
        [reply] = shard.handle(Push(0, 7, number, tuple(gradients), 8, 0.5), "push")
        assert not hasattr(reply, "error"), reply


def worker_state() -> dict[str, Any]:
    """What a worker keeps in the snapshot."""
    worker_state, place, rate = WorkerState(), LoopPosition(), StepDecay(0.5, step_size=2)
    place.loop, place.item, place.inside = 2, 11, True
    place.broken, place.collectives = {0: 4}, {1: (2, 1)}
    for _ in range(3):
        rate.step()
    worker_state.add(PLACE, place)
    worker_state.add("rate", rate)
    worker_state.add("noise", np.random.default_rng(5))
    kept: dict[str, Any] = json.loads(worker_state.capture(3))
    return kept


def save(
    fleet: list[Shard], path: Path, cutting: PendingCut, base: DeltaBase | None = None
) -> None:
    """A snapshot as a fleet writes it."""
    with SnapshotDraft(path) as draft:
        files, pushes = [], {}
        for shard in fleet:
            with contextlib.closing(shard.freeze(cutting)) as frozen:
                files.append(write_frozen(draft.folder, frozen))
                pushes = dict(frozen.pushes)
        cut = CutPosition(cutting.number, "async", 0, pushes)
        states = {0: worker_state(), 1: worker_state()}
        specs = tuple(table.spec for table in fleet[0].tables.values())
        draft.finish(Manifest(specs, tuple(files), cut, base, states))


def names() -> dict[str, Any]:
    """Names of operations and rules, and of what files say of them."""
    operations: list[str] = []
    kinds = Op.__subclasses__()
    for kind in kinds:
        kinds.extend(kind.__subclasses__())
        if kind.__module__.startswith("psfleet.") and kind.saved:
            operations.append(" ".join(kind.saved))
    rules = {rule.name: sorted(rule().hyperparameters()) for rule in RULES.values()}
    slots = {rule.name: [slot.name for slot in rule().slots] for rule in RULES.values()}
    return {"operations": sorted(set(operations)), "rules": rules, "slots": slots}


def build(folder: Path) -> None:
    """Write every golden file."""
    build_snapshots(folder)
    export(str(folder / "delta"), str(folder / "export"), "safetensors", ids=True)
    export(str(folder / "delta"), str(folder / "export-npz"), "npz", ids=False)
    fresh = EmbeddedRuntime()
    before = current().use(fresh)
    try:
        _build_model(folder / "model")
        _build_states(folder)
        _build_torch(folder / "optimizer.pt")
    finally:
        current().use(before)
        fresh.close()
    _build_job(folder / "job")
    text = json.dumps(names(), indent=1, sort_keys=True)
    (folder / "names.json").write_text(text + "\n")


def build_snapshots(folder: Path) -> None:
    """Write a snapshot and a delta of it."""
    folder.mkdir(parents=True)
    fleet = shards(4)
    save(fleet, folder / "base", PendingCut(1, remember=True))
    push(fleet, 5)
    for shard in fleet:
        table: Any = shard.tables[SPECS[2].key]
        table.remove(np.array([1, 2]))
    save(fleet, folder / "delta", PendingCut(2, since=1), linked(folder / "base", folder / "delta"))


def build_groups(folder: Path) -> None:
    """Write what version 2 can say: the same tables on groups of servers, and the notes of chaos."""
    build_grouped_snapshot(folder)
    _build_audit(folder / "job")


def build_grouped_snapshot(folder: Path) -> None:
    """Write a snapshot of tables on groups of servers."""
    folder.mkdir(parents=True)
    save(shards(4, specs=_GROUPED), folder / "base", PendingCut(1, remember=True))


def _build_model(folder: Path) -> None:
    with names_guard(), ps.program_guard(ps.Program(), ps.Program()):
        ids = layers.data("ids", [None, 2], dtype="int64")
        rows = layers.embedding(ids, size=[7, 3])
        out = layers.fc(layers.reshape(rows, [-1, 6]), 2, act="relu")
        save_inference(str(folder), [ids], [out], ps.default_main_program())


def _build_states(folder: Path) -> None:
    parameter = ps.Parameter("w", np.arange(3, dtype=np.float32))
    rate = StepDecay(0.5, step_size=2)
    adam = ps.optimizer.Adam(rate, parameters=[parameter])
    parameter.grad = np.ones(3, np.float32)
    adam.step()
    fluid.save_dygraph(adam.state_dict(), str(folder / "state"))


def _build_torch(where: Path) -> None:
    try:
        import torch

        import psfleet.torch as pst
    except ImportError:
        return

    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Embedding(4, 2, sparse=True), torch.nn.Linear(2, 1))
    sparse = torch.optim.SparseAdam(model[0].parameters())
    dense = torch.optim.Adam(model[1].parameters())
    twin, opt = pst.convert(model, [sparse, dense])
    twin(torch.tensor([1, 3])).sum().backward()
    opt.step()
    torch.save(opt.state_dict(), where)


def _build_job(folder: Path) -> None:
    folder.mkdir()
    write_ready(folder / "ready.0", 0, "unix:/tmp/psfleet/server.0", 4711)
    write_request(folder, 3, {"mode": "ssp", "staleness": 4})
    write_reply(folder, 3)


def _build_audit(folder: Path) -> None:
    folder.mkdir()
    tables = {"w": {"step": 3, "rows": 2, "sum": 2**64 - 1}}
    row = AuditedRow(0, 1, 7, 7 << 32)
    HELD.write(folder / "held.0.json", mode="async", audit={"1": {str(row.row): 3}}, tables=tables)
    audit = AuditFile(folder)
    audit.sent(row, 2)
    audit.acknowledged(row, 2)
    del audit
    [written] = folder.glob("pushed.*")
    written.rename(folder / "pushed.1.0")


if __name__ == "__main__":
    for target, write in (
        (VERSION, build),
        (VERSION_2, build_groups),
        (VERSION_3, build_snapshots),
        (GROUPS_3, build_grouped_snapshot),
    ):
        if target.exists():
            print(f"{str(target)!r} is there; golden files are never replaced, see CONTRIBUTING.md")
        else:
            write(target)
