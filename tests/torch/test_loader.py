"""A DataLoader in the loops of a fleet: its length, several epochs, seeds."""

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from psfleet.core.engine.worker_state import WorkerState
from psfleet.features import Feature, FeatureSet, Table
from psfleet.fleet.data_loops import DataLoops


def loops(index: int, workers: int) -> DataLoops:
    """Of one worker without a cluster."""
    return DataLoops(index, workers, lambda: None)


def loader(shuffle: bool = False, seed: int | None = None) -> DataLoader[tuple[torch.Tensor, ...]]:
    """Seven batches, the last one short."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return DataLoader(TensorDataset(torch.arange(20)), 3, shuffle=shuffle, generator=generator)


def test_a_part_has_the_length_of_its_loop() -> None:
    """A mean over `len` is one over the batches that this worker got; without a length there is none."""
    for index, own in enumerate((4, 3)):
        part = loops(index, 2).shard(loader(), True)
        assert len(part) == own  # type: ignore[arg-type]
        assert len(list(part)) == own
    assert not hasattr(loops(0, 2).shard(iter(loader()), True), "__len__")


def test_a_part_is_read_in_each_epoch() -> None:
    """Made once before the epochs, or in each of them: every worker gets its batches each time, in the
    order of a loader with the same seed, and together they get all."""
    parts = [loops(index, 2).shard(loader(True, 5), True) for index in range(2)]
    sequences = []
    for _ in range(3):
        actual = [[batch.tolist() for (batch,) in part] for part in parts]
        assert [len(own) for own in actual] == [4, 3]
        sequences.append(sorted(actual[0] + actual[1]))
        assert sorted(chain.from_iterable(sequences[-1])) == list(range(20))
    assert sequences[0] != sequences[1]


def test_workers_that_shuffle_by_themselves_are_told(capfd: pytest.CaptureFixture[str]) -> None:
    """Without a seed every process shuffles in another order; with one all do so alike."""
    before = torch.get_rng_state()
    torch.seed()
    list(loops(0, 2).shard(loader(True), True))
    assert "call torch.manual_seed(0)" in capfd.readouterr().err
    list(loops(0, 1).shard(loader(True), True))
    list(loops(0, 2).shard(loader(True, 3), True))
    torch.manual_seed(3)
    list(loops(0, 2).shard(loader(True), True))
    assert not capfd.readouterr().err
    torch.set_rng_state(before)


def test_a_scheduler_gets_back_its_rates() -> None:
    """Also those that torch keeps in the optimizer, from which the next step computes."""

    def made() -> tuple[torch.optim.SGD, torch.optim.lr_scheduler.ExponentialLR]:
        opt = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        return opt, torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)

    opt, scheduler = made()
    worker_state = WorkerState()
    worker_state.add("rate", scheduler)
    opt.step()
    scheduler.step()
    states = json.loads(worker_state.capture(1))["states"]
    opt, scheduler = made()
    WorkerState().add("rate", scheduler, states["rate"])
    opt.step()
    scheduler.step()
    assert scheduler.get_last_lr() == [0.25]


def test_batches_of_files(tmp_path: Path) -> None:
    """A loader of batches reads those of files, each process of a distributed job its part of them."""
    pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install psfleet[parquet]")
    from psfleet.data.batches import Batches
    from psfleet.data.text_files import TextFiles

    path = tmp_path / "a.txt"
    path.write_text("".join(f"{row} 3:0.5\n" for row in range(10)))
    features = FeatureSet([Feature("index", Table("t", 4), weighted=True, weights_column="value")])
    batches = Batches(TextFiles(path, features, ["label"], format="libsvm"), 3)
    parts: list[Any] = [batches[rank::2] for rank in (0, 1)]
    loaders = [DataLoader(part, batch_size=None) for part in parts]
    actual = [[batch.labels["label"].tolist() for batch in loader] for loader in loaders]
    assert actual == [[[0, 1, 2], [6, 7, 8]], [[3, 4, 5], [9]]]
