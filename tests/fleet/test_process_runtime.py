"""Threads that act as processes of their own: each has its runtime, its seat and its parameters."""

import threading

import numpy as np

import psfleet
from psfleet.core.base.threads import ServiceThread
from psfleet.core.engine.runtime_interface import Runtime
from psfleet.core.graph.parameters.parameter import Parameter
from psfleet.core.runtime.process_runtime import active, current, using
from psfleet.core.runtime.runtime_bases import ForwardingRuntime
from psfleet.core.runtime.script_runtime import ScriptRuntime
from psfleet.optimizer import SGD

STEPS = 3


def test_threads_that_act_as_processes_have_runtimes_of_their_own() -> None:
    """Two threads train a parameter and a client's table of the same names in turn, each as if it were alone;
    a thread that psfleet starts for one of them has its runtime, and that of the process knows no table."""
    turns, ends = threading.Barrier(2), dict[float, list[float]]()
    runtimes: dict[float, tuple[Runtime, Runtime]] = {}

    def train(rate: float) -> None:
        with using() as process:
            weight, sgd = Parameter("apart.w", np.ones(1, np.float32)), SGD(rate)
            with psfleet.connect() as ps:
                table = ps.dense_table("apart.t", np.ones(1, np.float32), SGD(rate))
                for _ in range(STEPS):
                    turns.wait(60)
                    sgd.apply_gradients([(weight, np.ones(1, np.float32))])
                    turns.wait(60)
                    table.push(np.ones(1, np.float32)).wait()
                    psfleet.fleet.barrier_worker()
                ends[rate] = [weight.numpy().item(), table.pull().item()]
                helper = ServiceThread(
                    lambda: runtimes.update({rate: (active(), ps.runtime)}), "helper"
                )
                helper.start()
                helper.join()
            runtime = process.use(None)
            assert runtime is not None  # the parameter has kept it
            runtime.close()

    outside, before = current(), current().is_active
    threads = [threading.Thread(target=train, args=(rate,)) for rate in (0.5, 0.25)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ends == {rate: [1 - STEPS * rate] * 2 for rate in (0.5, 0.25)}
    assert all(own is runtime for own, runtime in runtimes.values())
    assert runtimes[0.5][0] is not runtimes[0.25][0]
    assert current() is outside
    assert current().is_active == before


def test_a_runtime_around_another_one_forwards_every_member() -> None:
    """No member of a ForwardingRuntime has the default of a runtime that stands alone; `pull_ahead` and
    `skip_step` are made of its own `pull` and `push`, so that a subclass need not override them."""
    members = {name for name in dir(ScriptRuntime) if not name.startswith("_")}
    members |= {"counters", "wire"}  # attributes of instances
    assert members - vars(ForwardingRuntime).keys() == {"pull_ahead", "skip_step"}
