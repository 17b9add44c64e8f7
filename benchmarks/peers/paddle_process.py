"""A parameter server or worker of Paddle in async mode. Arguments: workload, rule, rows at the start.

The role is in the environment variables that Paddle's own launcher sets. Paddle sends gradients from its own
threads. Each run ends when all gradients are sent and acknowledged.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from data import FIELDS, W1_IDS, W3_DENSE, W3_IDS, batches_w1, batches_w3
from processes import hushed, keep_output, obey

with hushed():
    import paddle
    from paddle import static
    from paddle.distributed import fleet
    from paddle.distributed.ps.utils.public import get_the_one_recv_context

DIM, HIDDEN, BATCHES = 16, 400, 40
LENGTH, ARRAYS = 1_000_000, 16
Step = Callable[[int], None]


def rows_of(ids: Any, count: int) -> Any:
    """Look up rows of a table on the servers."""
    uniform = paddle.nn.initializer.Uniform(-0.01, 0.01)
    attributes = paddle.ParamAttr(name="rows", initializer=uniform)
    return static.nn.sparse_embedding(ids, [count, DIM], param_attr=attributes)


def model_w1() -> Any:
    """Return the loss of W1: the mean of 65,536 rows."""
    return paddle.mean(rows_of(static.data("ids", [-1, 1], "int64"), W1_IDS))


def model_w2() -> Any:
    """Return the loss of W2, from 16 arrays of a million values."""
    factor = static.data("factor", [1], "float32")
    half = paddle.nn.initializer.Constant(0.5)
    arrays = [
        static.create_parameter(
            [LENGTH // 1000, 1000],
            "float32",
            attr=paddle.ParamAttr(name=f"w{i:02}", initializer=half),
        )
        for i in range(ARRAYS)
    ]
    return paddle.add_n([paddle.mean(array * factor) for array in arrays])


def model_w3() -> Any:
    """Return the loss of W3, a click-through model."""
    ids = static.data("ids", [-1, FIELDS], "int64")
    wind = static.data("wind", [-1, W3_DENSE], "float32")
    label = static.data("label", [-1, 1], "float32")
    rows = rows_of(paddle.reshape(ids, [-1, 1]), W3_IDS)
    hidden = paddle.concat([paddle.reshape(rows, [-1, FIELDS * DIM]), wind], axis=1)
    hidden = static.nn.fc(hidden, HIDDEN, activation="relu")
    hidden = static.nn.fc(hidden, HIDDEN, activation="relu")
    logit = static.nn.fc(hidden, 1)
    return paddle.mean(paddle.nn.functional.binary_cross_entropy_with_logits(logit, label))


class Worker:
    """Connection of a worker to the servers, with its program and executor."""

    def __init__(self) -> None:
        self.executor = static.Executor(paddle.CPUPlace())
        self.executor.run(static.default_startup_program())
        fleet.init_worker()
        self.runtime = fleet.fleet._runtime_handle
        self.dense = get_the_one_recv_context(self.runtime.context, split_dense_table=False)
        self.main = static.default_main_program()

    def pull_dense(self) -> None:
        """Pull every dense parameter, which Paddle by itself does only now and then."""
        for table, names in self.dense.items():
            self.runtime._worker.pull_dense_params(static.global_scope(), table, names)

    def flush(self) -> None:
        """Wait until all gradients are at the servers."""
        self.runtime._worker.client_flush()


def w1(worker: Worker, rows: int) -> Step:
    """Return the step of W1, after filling the table with `rows` rows."""
    rank, workers = fleet.worker_index(), fleet.worker_num()
    pull = worker.main.clone()
    _keep(pull, "distributed_lookup_table")
    count = 1 << 17
    for start in range(rank * count, rows, workers * count):
        ids = np.arange(start, min(start + count, rows), dtype=np.int64)[:, None]
        worker.executor.run(pull, feed={"ids": ids}, fetch_list=[])
    batches = [ids[:, None] for ids in batches_w1(BATCHES, 10 + rank)]

    def step(number: int) -> None:
        worker.executor.run(worker.main, feed={"ids": batches[number % BATCHES]}, fetch_list=[])

    return step


def w2(worker: Worker, _: int) -> Step:
    """Return the step of W2: a program that only sends gradients, and a pull of all arrays."""
    push = worker.main.clone()
    names = [n for op in push.global_block().ops if op.type == "send" for n in op.input("X")]
    _keep(push, "send")
    fill = static.Program()
    for name in names:
        push.global_block().var(name).persistable = True
        shape = [LENGTH // 1000, 1000]
        gradient = fill.global_block().create_var(
            name=name, shape=shape, dtype="float32", persistable=True
        )
        attributes = {"shape": shape, "dtype": paddle.float32, "value": 1e-3}
        fill.global_block().append_op(
            type="fill_constant", outputs={"Out": gradient}, attrs=attributes
        )
    worker.executor.run(fill)

    def step(_: int) -> None:
        worker.pull_dense()
        worker.executor.run(push)

    return step


def w3(worker: Worker, _: int) -> Step:
    """Return the step of W3."""
    batches = [
        dict(zip(("ids", "wind", "label"), batch, strict=True))
        for batch in batches_w3(BATCHES, 5 + fleet.worker_index())
    ]

    def step(number: int) -> None:
        worker.pull_dense()
        worker.executor.run(worker.main, feed=batches[number % BATCHES], fetch_list=[])

    return step


def _keep(program: Any, kind: str) -> None:
    """Remove all operations of a program but those of one kind."""
    block = program.global_block()
    for position in reversed(range(len(block.ops))):
        if block.ops[position].type != kind:
            block._remove_op(position)
    program._fleet_opt = None


WORKLOADS = {"w1": (model_w1, w1), "w2": (model_w2, w2), "w3": (model_w3, w3)}


def begin(model: Callable[[], Any], rule: str) -> None:
    """Build the program, which Paddle splits into parts for servers and workers."""
    paddle.enable_static()
    several = int(os.environ["PADDLE_TRAINERS_NUM"]) > 1
    fleet.init(fleet.PaddleCloudRoleMaker(init_gloo=True) if several else None)
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = True
    adam = paddle.optimizer.Adam(1e-3, lazy_mode=True)
    made = paddle.optimizer.SGD(1e-3) if rule == "sgd" else adam
    fleet.distributed_optimizer(made, strategy).minimize(model())


def main() -> None:
    replies = keep_output()
    workload, rule, rows = sys.argv[1], sys.argv[2], int(sys.argv[3])
    model, steps = WORKLOADS[workload]
    with hushed():
        begin(model, rule)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    with hushed():
        worker = Worker()
    obey(steps(worker, rows), worker.flush, replies)
    fleet.stop_worker()


if __name__ == "__main__":
    main()
