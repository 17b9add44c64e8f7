"""Entry point of a trainer script: role, distributed optimizer, data, barriers, metrics and saving.

    from psfleet import fleet

    fleet.init()
    optimizer = fleet.distributed_optimizer(optimizer)
    for batch in fleet.dataset(files, batch_size=512):
        ...

The functions of this module are the methods of one `Fleet` object. A process that needs a second fleet
creates another `Fleet`. If the environment variables name no cluster, every function works on tables in
this process.

Read `fleet.py` first, then `data_loops.py` for how a script continues after a restart.
"""

from psfleet.core.graph.program import names, program
from psfleet.core.runtime.strategy import DistributedStrategy
from psfleet.core.runtime.strategy.distributed_strategy import decide_by
from psfleet.fleet.file_datasets import (
    InMemoryDataset,
    MultiSlotDataGenerator,
    MultiSlotStringDataGenerator,
    QueueDataset,
)
from psfleet.fleet.fleet import Fleet, process_fleet
from psfleet.fleet.roles import PaddleCloudRoleMaker, Role, UserDefinedRoleMaker
from psfleet.fleet.sums import MetricSums, Util

__all__ = [
    "DistributedStrategy",
    "Fleet",
    "InMemoryDataset",
    "MultiSlotDataGenerator",
    "MultiSlotStringDataGenerator",
    "PaddleCloudRoleMaker",
    "QueueDataset",
    "Role",
    "UserDefinedRoleMaker",
    "Util",
    "add_callbacks",
    "adopt",
    "barrier_worker",
    "dataset",
    "distributed_optimizer",
    "evaluate",
    "evictions",
    "forget",
    "init",
    "init_server",
    "init_worker",
    "is_first_worker",
    "is_server",
    "is_worker",
    "load_model",
    "log",
    "metrics",
    "print_table_stat",
    "remember",
    "report_evaluation",
    "run_server",
    "save_inference_model",
    "save_persistables",
    "scale_servers",
    "server_endpoints",
    "server_index",
    "server_num",
    "set_mode",
    "settings",
    "shard",
    "shrink",
    "snapshot",
    "staleness",
    "step_done",
    "stop_worker",
    "util",
    "worker_endpoints",
    "worker_index",
    "worker_num",
]

_fleet = process_fleet
util = _fleet.util
"""Collectives and helpers of this process's fleet: `fleet.util.all_reduce`, `get_file_shard` and others."""
init = _fleet.init
is_server = _fleet.is_server
is_worker = _fleet.is_worker
is_first_worker = _fleet.is_first_worker
worker_index = _fleet.worker_index
server_index = _fleet.server_index
worker_num = _fleet.worker_num
server_num = _fleet.server_num
settings = _fleet.settings
server_endpoints = _fleet.server_endpoints
worker_endpoints = _fleet.worker_endpoints
init_worker = _fleet.init_worker
init_server = _fleet.init_server
run_server = _fleet.run_server
stop_worker = _fleet.stop_worker
evictions = _fleet.evictions
forget = _fleet.forget
barrier_worker = _fleet.barrier_worker
adopt = _fleet.adopt
decide_by(adopt)
distributed_optimizer = _fleet.distributed_optimizer
set_mode = _fleet.set_mode
scale_servers = _fleet.scale_servers
dataset = _fleet.dataset
shard = _fleet.shard
metrics = MetricSums(_fleet.metrics, util)
evaluate = _fleet.evaluate
log = _fleet.log
add_callbacks = _fleet.add_callbacks
report_evaluation = _fleet.report_evaluation
remember = _fleet.remember
step_done = _fleet.step_done
snapshot = _fleet.snapshot
save_persistables = _fleet.save_persistables
load_model = _fleet.load_model
save_inference_model = _fleet.save_inference_model
shrink = _fleet.shrink
staleness = _fleet.staleness
print_table_stat = _fleet.print_table_stat


def reset() -> None:
    """Return this process to the state just after `import psfleet`, so that a model can be built again.

    Useful in tests and notebooks. Afterwards the default programs are empty, generated names count from 0,
    and `fleet.init()` has not been called. Programs that you have created yourself stay.

    - Without a cluster, the tables are lost. Save them before if you need them.
    - A worker of a cluster sends its outstanding pushes and leaves the fleet, as in `fleet.stop_worker()`.
    - Clients of `psfleet.connect()` share the fleet and are closed too.

    Do not call it inside `program_guard`.
    """
    program.renew()
    names.renew()
    forget()
