"""Steps per second when workers and servers are far apart, for each mode, compared with one call in flight.

A relay between them simulates the network, because a kernel may not have netem. For each worker and direction
it delays the bytes and limits their rate. A lost packet of 1,448 bytes arrives a round trip later, and so do
all bytes after it on its connection, as with TCP's fast retransmit. Congestion windows do not shrink. `ideal`
is a step that takes one round trip and the transfer time of its bytes.
"""

import asyncio
import contextlib
import dataclasses
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from reporting import Report, arguments, finish

from psfleet.core.base.settings.environment import Environment
from psfleet.core.base.settings.server_endpoints import addresses_of
from psfleet.core.engine.rules import Adam
from psfleet.core.engine.runtime_interface import Gradient, Read
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.runtime.modes.switch import ModeSwitchRuntime, connect
from psfleet.core.runtime.strategy import ConsistencySettings, WireSettings
from psfleet.fleet.testing.local_fleet import LocalFleet

DIM, IDS, ROWS, BATCH = 16, 2_000, 100_000, 512
WORKERS = 2
ROWS_TABLE = TableSpec("rows", "sparse", (DIM,), Adam())
PACKET = 1_448  # bytes
READ = 64 << 10


@dataclass(frozen=True)
class Network:
    """Simulated network between a worker and the servers.

    Attributes:
        trip: Seconds of a round trip.
        loss: Fraction of lost packets.
        rate: Bytes per second, or 0 for no limit.
    """

    trip: float
    loss: float = 0.0
    rate: float = 0.0


NETWORKS = {
    "none": Network(0.0),
    "10 ms": Network(0.010),
    "10 ms, 1 % lost": Network(0.010, loss=0.01),
    "10 ms, 100 Mbit/s": Network(0.010, rate=12.5e6),
    "50 ms": Network(0.050),
}


@dataclass(frozen=True)
class Contender:
    """Configuration of a job.

    Attributes:
        consistency: Consistency mode.
        servers: Number of servers.
        ahead: True to read the rows of the next step during the present step.
        wire: Compression on the wire, or None for none.
    """

    consistency: ConsistencySettings
    servers: int = 2
    ahead: bool = False
    wire: WireSettings | None = None


CONTENDERS = {
    "sync, 2 servers": Contender(ConsistencySettings("sync")),
    "sync, 1 server": Contender(ConsistencySettings("sync"), servers=1),
    "async": Contender(ConsistencySettings("async")),
    "async, read ahead": Contender(ConsistencySettings("async"), ahead=True),
    "async, read ahead, int8": Contender(
        ConsistencySettings("async"), ahead=True, wire=WireSettings("int8", "int8")
    ),
    "ssp, staleness 2": Contender(ConsistencySettings("ssp", staleness=2)),
    "geo, k_steps 10": Contender(ConsistencySettings("geo", k_steps=10)),
    "half-async": Contender(ConsistencySettings("half-async")),
}


class Direction:
    """Delayed bytes of one worker in one direction."""

    def __init__(self, network: Network, seed: int) -> None:
        self._network = network
        self._free = 0.0  # when the last byte is on its way
        self._dice = random.Random(seed)

    def due(self, size: int, after: float) -> float:
        """Return the arrival time of `size` bytes. Earlier bytes of the connection arrive at time `after`."""
        network, now = self._network, time.monotonic()
        if network.rate:
            self._free = now = max(now, self._free) + size / network.rate
        packets = -(-size // PACKET)
        lost = network.loss and self._dice.random() > (1 - network.loss) ** packets
        return max(after, now + network.trip * (1.5 if lost else 0.5))

    async def carry(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        """Carry the bytes of one connection to its other end."""
        on_the_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        delivery = asyncio.create_task(_deliver(on_the_way, target))
        due = 0.0
        with contextlib.suppress(OSError):
            while data := await source.read(READ):
                due = self.due(len(data), due)
                on_the_way.put_nowait((due, data))
        on_the_way.put_nowait((due, b""))
        await delivery


async def _deliver(
    on_the_way: asyncio.Queue[tuple[float, bytes]], to: asyncio.StreamWriter
) -> None:
    with contextlib.suppress(OSError):
        while True:
            due, data = await on_the_way.get()
            if (left := due - time.monotonic()) > 0:
                await asyncio.sleep(left)
            if not data:
                break
            to.write(data)
            await to.drain()
    to.close()


async def _listen(network: Network, addresses: dict[str, list[int]]) -> list[asyncio.Server]:
    """Accept connections at the same ports of these addresses. Each worker uses one address."""
    listeners = []
    for seed, (address, ports) in enumerate(addresses.items()):
        ways = Direction(network, 2 * seed), Direction(network, 2 * seed + 1)

        async def take(
            port: int,
            ways: tuple[Direction, Direction],
            source: asyncio.StreamReader,
            target: asyncio.StreamWriter,
        ) -> None:
            with contextlib.suppress(asyncio.CancelledError):  # the relay ends
                back, on = await asyncio.open_connection("127.0.0.1", port)
                await asyncio.gather(ways[0].carry(source, on), ways[1].carry(back, target))

        for port in ports:
            listeners.append(await asyncio.start_server(partial(take, port, ways), address, port))
    return listeners


@contextlib.contextmanager
def relay(network: Network, addresses: dict[str, list[int]]) -> Iterator[None]:
    """Context in which a thread simulates the network."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(_listen(network, addresses), loop).result()
        yield
    finally:
        asyncio.run_coroutine_threadsafe(_end(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _end() -> None:
    tasks_to_end = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks_to_end:
        task.cancel()
    await asyncio.gather(*tasks_to_end, return_exceptions=True)


def train(runtime: ModeSwitchRuntime, steps: int, ahead: bool, began: Callable[[], None]) -> None:
    """Make the steps of one worker. `began` is called after the warm-up, where the measurement starts."""
    dice = np.random.default_rng(runtime.worker_index)
    batches = dice.integers(0, ROWS, (steps + 5, IDS))
    gradient = np.full((IDS, DIM), 0.01, np.float32)
    following = None
    for number, ids in enumerate(batches):
        if number == 5:
            runtime.barrier()
            began()
            following = None
        if following is None:
            runtime.pull([Read(ROWS_TABLE.key, ids)])
        else:
            following.wait()
        if ahead and number + 1 < len(batches):
            following = runtime.pull_ahead([Read(ROWS_TABLE.key, batches[number + 1])])
        runtime.push([Gradient(ROWS_TABLE.key, gradient, ids, 1e-3)], samples=BATCH)
    runtime.flush()
    runtime.barrier()


def measure(contender: Contender, network: Network, steps: int) -> float:
    """Return the steps per second of all workers."""
    times: list[float] = []

    def work(environment: Environment) -> None:
        runtime = connect(environment, contender.consistency, contender.wire)
        runtime.create(ROWS_TABLE)
        train(runtime, steps, contender.ahead, lambda: times.append(time.monotonic()))
        times.append(time.monotonic())
        runtime.close()

    with LocalFleet(contender.servers, WORKERS, "plain tcp") as fleet:
        addresses = [
            location for endpoint in fleet.endpoints for location in addresses_of(endpoint)
        ]
        ports = [int(address.rpartition(":")[2]) for address in addresses]
        hosts = [f"127.0.0.{2 + worker}" for worker in range(WORKERS)]
        with relay(network, dict.fromkeys(hosts, ports)):
            threads = []
            for worker, host in enumerate(hosts):
                environment = fleet.environment(worker)
                far = tuple(server.replace("127.0.0.1", host) for server in environment.servers)
                environment = dataclasses.replace(environment, servers=far, lane="inline")
                threads.append(threading.Thread(target=work, args=(environment,)))
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    return WORKERS * steps / (max(times) - min(times))


def ideal(network: Network) -> float:
    """Return the steps per second with one call in flight and no other costs.

    0 means that there is no bound.
    """
    # Outbound are a push and the ids of a pull, back come the pull's rows.
    outbound, back = IDS * (8 + 4 * DIM + 8), IDS * 4 * DIM
    seconds = network.trip + ((outbound + back) / network.rate if network.rate else 0.0)
    return WORKERS / seconds if seconds else 0.0


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--networks", nargs="*", default=[*NETWORKS], help="what is between")
    parser.add_argument("--contenders", nargs="*", default=[*CONTENDERS], help="how to train")
    options = parser.parse_args()
    steps = options.steps or (20 if options.short else 60)
    report = Report("distance", f"Steps / s of {WORKERS} workers, {IDS:,} ids of {DIM} each")
    names = [(name, network) for name in options.contenders for network in options.networks]
    measured_rates: dict[tuple[str, str], list[float]] = {name: [] for name in names}
    for _ in range(options.runs):
        for (name, network), rates in measured_rates.items():
            rates.append(measure(CONTENDERS[name], NETWORKS[network], steps))
    report.rows.append(
        {"steps / s": "ideal", **{name: ideal(NETWORKS[name]) for name in options.networks}}
    )
    for name in options.contenders:
        rates_of = {
            network: statistics.median(measured_rates[name, network])
            for network in options.networks
        }
        report.rows.append({"steps / s": name, **rates_of})
    finish(report, options.json)


if __name__ == "__main__":
    main()
