"""The commonest calls in few steps: pushes and pulls of a known layout to which nothing else applies.

A call that is taken here has the response and the effects that ShardService gives it. Any other one gets
None, with nothing changed, and goes there.
"""

import time
from functools import partial

import numpy as np

from psfleet.kernels.generate import static_kernels
from psfleet.kernels.initial_values import address_of
from psfleet.observability.exposition import LatencyHistogram
from psfleet.platform.memory import content_address
from psfleet.shard.event_shortcuts import is_plain, may_be_plain, take
from psfleet.shard.events import Pull, Push
from psfleet.wire.v1.frame_pb2 import OUTCOME_APPLIED, OUTCOME_UNSPECIFIED
from psfleet_server.engine.shard_host import ShardHost
from psfleet_server.rpc.call_layout import MessageLayouts
from psfleet_server.rpc.pull_response import push_response

_UNSIGNED = 2**64 - 1


class PlainCalls:
    """Takes plain calls. Any thread may call.

    Args:
        host: Host of the shard.
        layouts: Layouts of calls with their tensors in the message.
        pulls, exchanges: Get the time from each call to its answer.

    Attributes:
        push, pull, exchange: Take a call of this method.
    """

    def __init__(
        self,
        host: ShardHost,
        layouts: MessageLayouts,
        pulls: LatencyHistogram,
        exchanges: LatencyHistogram,
    ) -> None:
        self.push = partial(self._take, True, False, None)
        self.pull = partial(self._take, False, True, pulls)
        self.exchange = partial(self._take, True, True, exchanges)
        self._host = host
        self._layouts = layouts
        kernels = static_kernels("plain_call")
        self._read, self._loss = kernels.read, kernels.LOSS
        self._fields = np.zeros(kernels.FIELDS, np.int64)
        self._words, self._losses = self._fields.data, self._fields.view(np.float64).data
        self._place = address_of(self._fields)

    def _take(
        self, pushes: bool, pulls: bool, latency: LatencyHistogram | None, request: bytes
    ) -> bytes | None:
        began = time.perf_counter_ns()
        host, address, size = self._host, content_address(request), len(request)
        shard, sizes, push, pull = host.shard, host.bytes, None, None
        with host.lock:
            if not may_be_plain(shard) or host.waiting_calls >= host.limits.waiting_calls:
                return None
            if not self._read(address, size, self._place):
                return None
            # fmt: off
            (
                layout, layout_end, worker, incarnation, sequence, samples, has_loss, _, clock, leases,
                lease_samples, skipped, progress, progress_end, has_lane, generation, turn, payload,
            ) = self._words.tolist()
            # fmt: on
            known, plan, base = request[layout:layout_end], None, 0
            if has_lane and not payload:
                generation &= _UNSIGNED
                plan = host.lanes.plan(worker, generation, known)
            elif payload and not has_lane:
                plan, base = self._layouts.plan(known, size - payload), address + payload
            if plan is None or plan.pushes != pushes or plan.pulls != pulls:
                return None
            if plan.version != shard.tables.version:
                self._layouts.forget()
                host.lanes.forget_layouts()
                return None
            if pushes:
                loss = self._losses[self._loss] if has_loss else None
                position = (leases, lease_samples) if leases or lease_samples else None
                try:
                    text = request[progress:progress_end].decode() if progress else ""
                except UnicodeDecodeError:
                    return None
                told = samples, loss, clock, None, position, None, text, skipped
                push = Push(worker, incarnation, sequence, (), *told)
            if pulls:
                pull = Pull(worker, incarnation, (), 0, clock)
            if not is_plain(shard, push, plan, pull, base):
                return None
            if has_lane and not host.lanes.claim(worker, generation, turn):
                return None
            take(shard, push, plan, pull, base)
            sizes.plain += 1
        if has_lane:
            sizes.push += plan.gradient_bytes
        outcome = OUTCOME_UNSPECIFIED
        if pushes:
            outcome = OUTCOME_APPLIED
            spent, measured = time.perf_counter_ns() - began, host.latencies.push
            measured.counts[spent.bit_length()] += 1
            measured.total += spent
        if latency is None:
            sizes.push += size
            return push_response(outcome)
        if pushes:
            sizes.exchange += size
        else:
            sizes.pull += size
        message, sent = plan.respond(base, outcome, shard.workers.view)
        sizes.values += sent
        spent = time.perf_counter_ns() - began
        latency.counts[spent.bit_length()] += 1
        latency.total += spent
        return message
