"""DataClient: a worker's loop over a dataset of the fleet.

It requests this worker's samples from server 0, and sends the samples of each step to the worker's other
pipeline stages. `session/data_shares.py` decides what to request and when. This module makes the calls, in
the training thread.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from psfleet.core.engine.round_plan import Range, RoundPlan, SourceParts
from psfleet.core.net.membership_messages import read_pairs, read_plan_entry
from psfleet.core.net.v1 import membership_pb2
from psfleet.core.runtime.script_runtime import ScriptRuntime
from psfleet.core.runtime.stages import here, links
from psfleet_worker.connection.call import wait_all
from psfleet_worker.connection.connection import FleetConnection
from psfleet_worker.session.data_shares import WorkerData
from psfleet_worker.session.instructions import (
    DataReply,
    FlushPushes,
    HearStages,
    Instruction,
    Program,
    RequestData,
    SkipStep,
    TellStages,
    TrainStep,
)

Ranges = tuple[Range, ...]


class DataClient:
    """Calls of a worker for one pass over a dataset.

    Args:
        trainer: Runtime of the script, which flushes pushes and makes steps without gradients.
        number: Number of the dataset in this process, from 1.
        size: Number of samples of an epoch.
        seed: Seed of the order of samples. Server 0 checks that all workers use the same seed.
        parts: Parts of a source that grows, or None for any other source.
    """

    def __init__(
        self,
        fleet: FleetConnection,
        trainer: ScriptRuntime,
        number: int,
        size: int,
        epochs: int,
        seed: int,
        parts: SourceParts | None = None,
    ) -> None:
        self._fleet = fleet
        self._trainer = trainer
        self._parts = parts or SourceParts(0)
        self._message = membership_pb2.AssignDataRequest(
            worker=fleet.worker,
            incarnation=fleet.session.incarnation,
            dataset=number,
            size=size,
            epochs=epochs,
            seed=seed,
            group=here().processes,
            parts=self._parts.count,
        )
        self._tags = itertools.count()

    def steps(self, worker_data: WorkerData, batch: int, merged: int) -> Iterator[Ranges]:
        """Yield the positions of each step's samples, as `ScriptRuntime.data_steps` does.

        Args:
            worker_data: State machine of the worker's datasets.
            merged: Number of steps whose gradients are merged into one push.
        """
        position = here()
        return self._run(worker_data.steps(batch, merged, position.process, position.processes))

    def _run(self, program: Program[None]) -> Iterator[Ranges]:
        outcome: Any = None
        while True:
            try:
                instruction = program.send(outcome)
            except StopIteration:
                return
            if isinstance(instruction, TrainStep):
                outcome = yield instruction.ranges
            else:
                outcome = self._perform(instruction)

    def _perform(self, instruction: Instruction) -> Any:
        match instruction:
            case RequestData():
                return self._request_data(instruction)
            case FlushPushes():
                return self._trainer.flush()
            case SkipStep():
                return self._trainer.skip_step()
            case TellStages(ranges):
                return self._tell(ranges)
            case HearStages():
                [message] = links().receive(0, self._tag())
                return tuple((low, high) for low, high in message.tolist())
            case _:
                return self._fleet.perform(instruction)

    def _request_data(self, request: RequestData) -> DataReply:
        message = self._message
        message.batch, message.round = request.batch, request.round
        message.lease, message.used = request.lease, request.used
        call = self._fleet.clients[0].start("Coordinator/AssignData", message.SerializeToString())
        reply = membership_pb2.AssignDataReply.FromString(wait_all([call])[0])
        self._parts.count = reply.parts
        if request.round:
            entries = tuple(map(read_plan_entry, reply.plan))
            return DataReply(RoundPlan(message.size, message.batch, entries), reply.view)
        if reply.ended or reply.plan:  # data of a round plan, in another mode, is over
            return DataReply((), reply.view)
        return DataReply(read_pairs(reply.lease) or None, reply.view)

    def _tell(self, ranges: Ranges) -> None:
        message, tag = np.array(ranges, np.int64), self._tag()
        for process in range(1, here().processes):
            links().send(process, tag, [message])

    def _tag(self) -> str:
        return f"dataset/{self._message.dataset}/{next(self._tags)}"
