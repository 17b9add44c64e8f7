"""W3: click-through rate end to end: 26 sparse fields x 16, MLP 400-400-1, batch 2048, Adam, async.

2 servers, and 2 workers unless --workers is given; "one process" has neither. The warm-up uses every batch
once, so that all rows exist, as in a table that has been in use for a while.
"""

import contextlib
import functools
import itertools
import sys
from collections.abc import Callable
from typing import Any

from data import FIELDS, W3_BATCH, W3_DENSE, W3_IDS, batches_w3
from measuring import Summary, in_turn
from peers import attendance
from peers.torch_group import torch_alone
from processes import BETWEEN_HOSTS, Connection, obey, psfleet_crew
from reporting import Report, arguments, finish

DIM, HIDDEN, BATCHES = 16, 400, 40


def work_program(
    amp: bool = False,
    ids_in_all: int = W3_IDS,
    batch: int = W3_BATCH,
    count: int = BATCHES,
    hidden_size: int = HIDDEN,
) -> None:
    """Run a worker of psfleet whose dense part is the built-in program, with `count` batches."""
    import psfleet as ps
    from psfleet import fleet, layers, optimizer

    fleet.init()
    ids = layers.data("ids", [None, FIELDS], dtype="int64")
    wind = layers.data("wind", [None, W3_DENSE])
    label = layers.data("label", [None, 1])
    rows = layers.embedding(ids, size=[ids_in_all, DIM], is_distributed=True, name="rows")
    hidden = layers.concat([layers.reshape(rows, [-1, FIELDS * DIM]), wind], axis=1)
    hidden = layers.fc(hidden, hidden_size, act="relu", name="first")
    hidden = layers.fc(hidden, hidden_size, act="relu", name="second")
    logit = layers.fc(hidden, 1, name="last")
    loss = layers.mean(layers.sigmoid_cross_entropy_with_logits(logit, label))
    strategy = fleet.DistributedStrategy(a_sync=True, amp=amp)
    fleet.distributed_optimizer(optimizer.Adam(1e-3), strategy=strategy).minimize(loss)
    executor = ps.Executor()
    batches = [
        dict(zip(("ids", "wind", "label"), columns, strict=True))
        for columns in batches_w3(count, 5 + fleet.worker_index(), ids_in_all, batch)
    ]
    obey(lambda number: _run(executor, batches[number % count], loss), _flush)


def _run(executor: Any, batch: dict[str, Any], loss: Any) -> None:
    executor.run(feed=batch, fetch_list=[loss])


def _flush() -> None:
    from psfleet.core.runtime.process_runtime import active

    active().flush()


def work_torch(amp: bool = False, count: int = BATCHES) -> None:
    """Run a worker of psfleet whose dense part is PyTorch."""
    import torch
    from peers.torch_model import Ctr

    import psfleet.torch as pst
    from psfleet import fleet

    torch.set_num_threads(1)
    fleet.init(strategy=fleet.DistributedStrategy(a_sync=True))
    model: Any = Ctr(W3_IDS)
    sparse = torch.optim.SparseAdam(list(model.rows.parameters()), 1e-3)
    dense = torch.optim.Adam(model.mlp.parameters(), 1e-3)
    model, opt = pst.convert(model, (sparse, dense))
    loss_of = torch.nn.BCEWithLogitsLoss()
    batches = [
        tuple(map(torch.from_numpy, batch)) for batch in batches_w3(count, 5 + fleet.worker_index())
    ]
    ahead = pst.prefetch(itertools.cycle(batches))

    def step(_: int) -> None:
        ids, wind, label = next(ahead)
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            loss = loss_of(model(ids, wind), label)
        loss.backward()
        opt.step()
        opt.clear_grad()

    obey(step, _flush)


WORK: dict[str, Callable[..., None]] = {
    "program": work_program,
    "program-bf16": functools.partial(work_program, amp=True),
    "torch": work_torch,
    "torch-bf16": functools.partial(work_torch, amp=True),
}


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--batches", type=int, default=BATCHES, help="the warm-up sees each of them once"
    )
    parser.add_argument("--psfleet-torch", action="store_true", help="psfleet through torch too")
    parser.add_argument("--bf16", action="store_true", help="contenders that multiply in bfloat16")
    options = parser.parse_args()
    report = Report(
        "w3_ctr",
        f"W3 CTR: {FIELDS} fields x {DIM}, MLP {HIDDEN}-{HIDDEN}-1, batch "
        f"{W3_BATCH}, Adam, async, 2 servers + {options.workers} workers",
    )
    with contextlib.ExitStack() as stack:
        crews = [
            stack.enter_context(
                psfleet_crew(
                    name,
                    [__file__, "--worker", str(options.batches), kind],
                    over=over,
                    workers=options.workers,
                )
            )
            for name, kind, over in contenders(options.psfleet_torch, options.bf16)
        ]
        peers = [
            attendance.torch("w3", options.workers),
            attendance.Peer("torch, one process", "torch", torch_alone),
            *(_bf16_peers(options.workers) if options.bf16 else ()),
            attendance.tensorflow("w3", options.workers, "adagrad"),
            attendance.tensorflow("w3", options.workers, "adam"),
            attendance.paddle("w3", options.workers, "adam"),
        ]
        crews += attendance.enter(stack, report, options, peers)
        steps = options.steps or (15 if options.short else 40)
        summaries = in_turn(crews, warm=options.batches, steps=steps, runs=options.runs)
    for crew in crews:
        report.rows.append(row(crew.name, crew.workers, steps, summaries[crew.name]))
    finish(report, options.json)


def contenders(through_torch: bool, bf16: bool) -> list[tuple[str, str, Connection]]:
    """Return (name, worker, its connection) of each psfleet contender."""
    memory = Connection.MEMORY
    entries = [("psfleet", "program", memory)]
    entries += [(name, "program", over) for name, over in BETWEEN_HOSTS.items()]
    if bf16:
        entries.append(("psfleet, bf16", "program-bf16", memory))
    if through_torch:
        entries.append(("psfleet through torch", "torch", memory))
    if through_torch and bf16:
        entries.append(("psfleet through torch, bf16", "torch-bf16", memory))
    return entries


def _bf16_peers(workers: int) -> list[attendance.Peer]:
    """Return torch with autocast, over rpc and in one process."""
    rpc = attendance.torch("w3-bf16", workers)
    return [
        attendance.Peer("torch rpc, bf16", "torch", rpc.crew),
        attendance.Peer(
            "torch, one process, bf16", "torch", lambda name: torch_alone(name, "--bf16")
        ),
    ]


def row(name: str, workers: int, steps: int, summary: Summary) -> dict[str, Any]:
    samples = W3_BATCH * steps * workers
    return {
        "contender": name,
        "workers": workers,
        "CPU us / sample": summary.cpu / samples * 1e6,
        "samples / s": samples / summary.wall,
        "servers": summary.parts.get("servers", 0.0) / samples * 1e6,
        "workers' part": summary.parts["workers"] / samples * 1e6,
        **summary.noise,
    }


if __name__ == "__main__":
    if "--worker" in sys.argv:
        WORK[sys.argv[3]](count=int(sys.argv[2]))
    else:
        main()
