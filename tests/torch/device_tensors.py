"""Tensors that embeddings hand to tables on the same GPU, and get from them, without host memory.

tests/kernels/test_cuda.py runs these tests on simulated devices, and `make test-gpu` on a GPU; both with the
plugins tests.tables.on_device and tests.torch.on_table_gpu.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import psfleet
import psfleet.torch as pst
from psfleet.core.base.errors import IdError, UsageError
from psfleet.core.engine.device_arrays import DeviceSums
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.tables.memory_choice import MemoryChoice
from psfleet.core.engine.tables.sparse import SparseTable
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from psfleet.torch import device_tensors
from tests.tables.test_freezing import content, read
from tests.torch.models import under

Step = Callable[[nn.Module, torch.Generator], Tensor]
Optimizer = Callable[[Any], torch.optim.Optimizer | None]
Run = tuple[list[Any], EmbeddedRuntime]


@pytest.fixture
def device() -> torch.device:
    """Where the tables and their tensors are."""
    return device_tensors.table_gpu()


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Counts of pulls and pushes that used tensors, and of copies of tensors to the host."""
    counts = {"pulls": 0, "pushes": 0, "copies": 0}
    pull, push, copy = (
        SparseTable.pull_to_device,
        SparseTable._push,
        device_tensors.TensorArray.to_host,
    )

    def counted_pull(self: Any, *arguments: Any) -> bool:
        done = pull(self, *arguments)
        counts["pulls"] += done
        return done

    def counted_push(self: Any, ids: Any, gradients: Any, rate: float) -> None:
        counts["pushes"] += isinstance(gradients, DeviceSums)
        push(self, ids, gradients, rate)

    def counted_copy(self: Any) -> Any:
        counts["copies"] += 1
        return copy(self)

    monkeypatch.setattr(SparseTable, "pull_to_device", counted_pull)
    monkeypatch.setattr(SparseTable, "_push", counted_push)
    monkeypatch.setattr(device_tensors.TensorArray, "to_host", counted_copy)
    return counts


def bits(values: Any) -> bytes:
    return np.ascontiguousarray(values).tobytes()


def trained(
    make: Callable[[Any], nn.Module], optimizer: Optimizer, step: Step, memory: str, steps: int = 6
) -> Run:
    """What each step has looked up, and what its tables hold then, with the tables in this memory."""
    runtime, dice = EmbeddedRuntime(), torch.Generator().manual_seed(1)
    model = make(memory)
    opt = pst.DistributedOptimizer(model, optimizer(model.parameters()), runtime=runtime)
    seen: list[Any] = []
    for _ in range(steps):
        rows = step(model, dice)
        seen.append(bits(rows.detach().cpu().numpy()))
        factors = torch.randn(rows.shape, generator=dice).to(rows.device)
        (rows * factors).sum().backward()
        opt.step()
        opt.zero_grad()
    for key in sorted(runtime.specs()):
        state = runtime.read_table(key)
        assert state.ids is not None
        assert state.touched is not None
        seen.append((bits(state.ids), bits(state.touched), [*map(bits, state.values)]))
    return seen, runtime


def same_bits(make: Callable[[Any], nn.Module], optimizer: Optimizer, step: Step) -> None:
    """Check that tensors on the device and the way through the host give the same bits."""
    assert trained(make, optimizer, step, "cuda")[0] == trained(make, optimizer, step, "cpu")[0]


def ids_of(dice: torch.Generator, *shape: int, most: int = 30) -> Tensor:
    """Ids with many repeats, among them new ones in each step."""
    return torch.randint(0, most, shape, generator=dice).to(device_tensors.table_gpu())


def unbounded(memory: Any, **options: Any) -> nn.Module:
    return pst.Embedding(None, 5, name="users", device=memory, **options)


def look_up(model: nn.Module, dice: torch.Generator) -> Tensor:
    ids = ids_of(dice, 9, 7)
    rows: Tensor = model(ids * 2**40 - 2**43)
    return rows


def sparse_adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SparseAdam(parameters, lr=0.1)


OPTIMIZERS: dict[str, Optimizer] = {
    "SparseAdam": sparse_adam,
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
}
OWN = {
    "row-wise Adagrad": lambda: psfleet.optimizer.RowWiseAdagrad(0.1),
    "Adam of every row": lambda: psfleet.optimizer.Adam(0.1),
    "Lamb": lambda: psfleet.optimizer.Lamb(0.1),
    "Ftrl, l2": lambda: psfleet.optimizer.Ftrl(0.1, l2=0.01),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_rows_and_gradients_stay_there(optimizer: Optimizer, shared: dict[str, int]) -> None:
    """Repeated and new ids of any int64: same rows, state and steps, and no tensor is copied to the host."""
    same_bits(unbounded, optimizer, look_up)
    assert shared == {"pulls": 6, "pushes": 6, "copies": 0}


def test_a_number_of_rows(shared: dict[str, int]) -> None:
    """Ids are the gradient's indices there, and the padding's row gets none."""

    def make(memory: Any) -> nn.Module:
        return pst.Embedding(30, 5, padding_idx=4, name="words", device=memory)

    def step(model: nn.Module, dice: torch.Generator) -> Tensor:
        rows: Tensor = model(ids_of(dice, 9, 7))
        return rows

    same_bits(make, lambda parameters: torch.optim.Adagrad(parameters, lr=0.1), step)
    assert shared == {"pulls": 6, "pushes": 6, "copies": 0}


@pytest.mark.parametrize("own", OWN.values(), ids=OWN)
def test_own_optimizers(own: Callable[[], Any], shared: dict[str, int]) -> None:
    """Rules with a sum over the row, with an update of all rows, and with a decay."""
    same_bits(lambda memory: unbounded(memory, optimizer=own()), lambda parameters: None, look_up)
    assert shared == {"pulls": 6, "pushes": 6, "copies": 0}


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags(mode: Any, shared: dict[str, int]) -> None:
    """Bags are pooled by torch where the rows are: with offsets, empty bags, padding and weights."""

    def make(memory: Any) -> nn.Module:
        return pst.EmbeddingBag(30, 4, mode, padding_idx=3, name="tags", device=memory)

    def step(model: nn.Module, dice: torch.Generator) -> Tensor:
        ids = ids_of(dice, 40)
        offsets = torch.tensor([0, 0, 7, 8, 8, 30], device=ids.device)
        weights = torch.rand(40, generator=dice).to(ids.device) if mode == "sum" else None
        flat: Tensor = model(ids, offsets, weights)
        whole: Tensor = model(ids.reshape(8, 5).int())
        return torch.cat([flat, whole])

    same_bits(make, sparse_adam, step)
    assert shared == {"pulls": 12, "pushes": 6, "copies": 0}


def test_the_sign_of_zero_is_that_of_the_host(device: torch.device) -> None:
    """A sum begins at 0, so a gradient of -0 is one of 0, repeated or not."""
    ids = torch.tensor([7, 3, 7, 9], device=device)
    values = torch.tensor([[-0.0], [-0.0], [-0.0], [1e-45]], device=device)
    finished = device_tensors.device_gradient(ids, values).sums()
    assert finished is not None
    assert np.asarray(finished.ids).tolist() == [3, 7, 9]
    assert bits(np.asarray(finished)) == bits(np.array([[0], [0], [1e-45]], np.float32))


def test_a_batch_without_ids(shared: dict[str, int]) -> None:
    """It is a step too."""

    def step(model: nn.Module, dice: torch.Generator) -> Tensor:
        rows: Tensor = model(ids_of(dice, 3)[:0] if dice.initial_seed() else ids_of(dice, 3))
        return rows

    same_bits(unbounded, sparse_adam, step)
    assert shared["copies"] == 0


def test_several_passes_and_changed_rows(shared: dict[str, int]) -> None:
    """Gradients of several look-ups and passes add up, and a model may change the rows in place."""

    def step(model: nn.Module, dice: torch.Generator) -> Tensor:
        first = model(ids_of(dice, 12)).relu_()
        first.sum().backward()
        rows: Tensor = model(ids_of(dice, 4, 3)) * 2
        return rows

    same_bits(unbounded, sparse_adam, step)
    assert shared == {"pulls": 12, "pushes": 6, "copies": 0}


def test_the_gradient_is_a_parameters(device: torch.device) -> None:
    """`weight.grad` is on the device, where hooks and clipping may change it."""
    runtime, model = EmbeddedRuntime(), unbounded("cuda")
    opt = pst.DistributedOptimizer(model, sparse_adam(model.parameters()), runtime=runtime)
    model(torch.tensor([1, 2, 1], device=device)).sum().backward()
    weight = model.weight
    assert isinstance(weight, Tensor)
    assert weight.grad is not None
    assert weight.device == weight.grad.device == device
    weight.grad *= 0
    before = bits(model(torch.tensor([1, 2], device=device)).detach().cpu().numpy())
    opt.step()
    assert bits(model(torch.tensor([1, 2], device=device)).detach().cpu().numpy()) == before


FALLS_BACK: dict[str, tuple[Callable[[Any], nn.Module], int]] = {
    "an entry": (lambda m: unbounded(m, entry=psfleet.CountFilterEntry(2)), 0),
    "counts": (lambda m: unbounded(m, entry=psfleet.ShowClickEntry("s", "c")), 0),
    "normal values": (lambda m: unbounded(m, initializer=psfleet.initializer.Normal()), 0),
    "16 bits": (lambda m: unbounded(m, precision="bfloat16"), 6),
}


@pytest.mark.parametrize(("make", "pushes"), FALLS_BACK.values(), ids=FALLS_BACK)
def test_other_tables(
    make: Callable[[Any], nn.Module], pushes: int, shared: dict[str, int]
) -> None:
    """What the device cannot do alone goes through the host, with the same bits."""
    same_bits(make, sparse_adam, look_up)
    assert (shared["pulls"], shared["pushes"]) == (pushes, pushes)


STRATEGIES: dict[str, dict[str, Any]] = {
    "amp": {"amp": {"dtype": "bfloat16"}},
    "merged": {"gradient_merge": {"k_steps": 2, "avg": True}},
}


@pytest.mark.parametrize("parts", STRATEGIES.values(), ids=STRATEGIES)
def test_strategies(parts: dict[str, Any], shared: dict[str, int]) -> None:
    """What a strategy does to gradients is done on the host, with the same bits."""
    under(**parts)
    same_bits(unbounded, sparse_adam, look_up)
    assert (shared["pulls"], shared["pushes"]) == (6, 0)


def test_rows_in_host_memory(
    pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch, shared: dict[str, int]
) -> None:
    """A table that outgrows the device goes through the host from then on."""
    if pytestconfig.getoption("--device-order") is not None:
        pytest.skip("copies of a few bytes at a time would take minutes")

    def wide(memory: Any) -> nn.Module:
        return pst.Embedding(None, 256, name="wide", device=memory)

    def step(model: nn.Module, dice: torch.Generator) -> Tensor:
        rows: Tensor = model(ids_of(dice, 2000, most=10**6))
        return rows

    room = 24 << 20  # of which an empty table takes 10
    embedded = MemoryChoice(has_devices=True, limits={"cuda": room})
    monkeypatch.setattr(MemoryChoice, "embedded", lambda folder: embedded)
    seen, runtime = trained(wide, sparse_adam, step, "cuda")
    table = runtime.table(next(iter(runtime.specs())))
    assert isinstance(table, SparseTable)
    assert table.spilled > 0
    assert 0 < shared["pushes"] < 6
    assert 0 < shared["pulls"] < 6
    assert seen == trained(wide, sparse_adam, step, "cpu")[0]


def test_a_snapshot_in_progress_gets_its_rows(device: torch.device, shared: dict[str, int]) -> None:
    """A push of a time when rows are still to be copied passes them through the host."""
    runtime, model = EmbeddedRuntime(), unbounded("cuda")
    opt = pst.DistributedOptimizer(model, sparse_adam(model.parameters()), runtime=runtime)

    def step() -> None:
        model(torch.arange(20, device=device)).sum().backward()
        opt.step()
        opt.zero_grad()

    step()
    key = next(iter(runtime.specs()))
    table = runtime.table(key)
    assert isinstance(table, SparseTable)
    before = content(read(table.freeze()))
    image = table.freeze()
    step()
    assert content(read(image)) == before != content(read(table.freeze()))
    assert shared["pushes"] == 1
    step()
    assert shared["pushes"] == 2


def test_ids_out_of_range(device: torch.device) -> None:
    """The sentence is that of host memory, and no parameter changes."""
    runtime, model = EmbeddedRuntime(), pst.Embedding(9, 4, name="few", device="cuda")
    pst.DistributedOptimizer(model, sparse_adam(model.parameters()), runtime=runtime)
    with pytest.raises(IdError, match=r"'few' has rows 0 to 8; id 9 is not one of them"):
        model(torch.tensor([[0, 9]], device=device))
    with pytest.raises(IdError, match=r"'few' has rows 0 to 8; id -1 is not one of them"):
        model(torch.tensor([3, -1, 12], device=device))


@pytest.mark.parametrize("policy", ["stop", "skip", "say"])
def test_values_that_are_not_finite(
    policy: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are found before a row changes, and named by the id that comes first in the batch."""
    monkeypatch.setenv("PSFLEET_ON_NAN", policy)
    contents = []
    for memory in ("cuda", "cpu"):
        runtime, model = EmbeddedRuntime(), unbounded(memory)
        opt = pst.DistributedOptimizer(model, sparse_adam(model.parameters()), runtime=runtime)
        factors = torch.ones(4, 5, device=device)
        factors[1, 2] = factors[3, 0] = float("nan")
        (model(torch.tensor([4, 9, 4, 1], device=device)) * factors).sum().backward()
        sentence = ""
        if policy == "stop":
            with pytest.raises(UsageError, match="has nan for id 9; it was not pushed") as raised:
                opt.step()
            sentence = str(raised.value)
        else:
            opt.step()
        state = runtime.read_table(next(iter(runtime.specs())))
        contents.append((sentence, state.step, bits(state.ids), [*map(bits, state.values)]))
        assert runtime._watch.first is not None
    assert contents[0] == contents[1]
    assert (contents[0][1] == 0) == (policy == "stop")


class LateArray(device_tensors.TensorArray):
    """A tensor in the stream of a library that does its work late."""

    def __init__(self, tensor: Tensor, stream: int) -> None:
        super().__init__(tensor)
        self.stream = stream


class LateSums(LateArray, DeviceSums):
    """Gradients in such a stream."""

    def __init__(self, tensor: Tensor, ids: Tensor, stream: int) -> None:
        super().__init__(tensor, stream)
        self.ids, self.square = LateArray(ids, stream), 1.0


def test_the_streams_of_tables_and_library_take_turns(pytestconfig: pytest.Config) -> None:
    """A table reads what the library has written, however late, and the library overwrites it only then."""
    if pytestconfig.getoption("--device-order") is None:
        pytest.skip("streams do their work in turn here")
    from psfleet.core.engine.kernels.device.cuda_queue import shared_staging
    from psfleet.core.engine.rules import SGD
    from tests.tables.device_order import LateOperations

    operations = shared_staging().operations
    assert isinstance(operations, LateOperations)
    table = SparseTable(TableSpec("t", "sparse", (3,), SGD()), device="cuda")
    stream, done = operations.library(), operations.event()
    ids, sums, out = torch.zeros(4, dtype=torch.int64), torch.zeros(4, 3), torch.zeros(4, 3)
    for step in range(4):
        operations.do_late(stream, partial(ids.copy_, torch.arange(step, step + 4)))
        operations.do_late(stream, lambda: sums.fill_(1.0))
        values: Any = LateSums(sums, ids, stream)
        table.push(values.ids, values, 1.0)
        operations.do_late(stream, lambda: sums.fill_(100.0))
    assert table.pull_to_device(LateArray(ids, stream), LateArray(out, stream))
    found: list[Tensor] = []
    operations.do_late(stream, lambda: found.append(out.clone()))
    operations.do_late(stream, lambda: out.fill_(9.0))
    operations.record(done, operations.stream_at(stream))
    operations.finish(done)
    first = np.empty((4, 3), np.float32)
    SparseTable(table.spec).pull_into(np.arange(3, 7), first)
    pushes = np.array([[4], [3], [2], [1]], np.float32)
    expected = first.copy()
    for n in range(4):
        expected[pushes[:, 0] > n] -= 1
    assert bits(found[0].numpy()) == bits(expected)
