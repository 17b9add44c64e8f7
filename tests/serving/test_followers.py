"""Followers have the weights of a running job at each cut that they announce, whatever dies."""

import contextlib
import dataclasses
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray

import psfleet
from psfleet.core.base.errors import AccessDenied, ConfigError, ServerUnavailable, UsageError
from psfleet.core.base.settings.environment import Environment
from psfleet.core.engine.kernels.id_routing import owned_by
from psfleet.core.engine.rules import make_rule
from psfleet.core.engine.runtime_interface import FollowedCut, Gradient, Read, Runtime, load_runtime
from psfleet.core.engine.schema.entry import CapacityEntry
from psfleet.core.engine.schema.table import InitializerSpec, TableSpec
from psfleet.core.net.connections.access import Access
from psfleet.core.net.connections.certificates import make_credentials
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet.serving.follower import Follower
from psfleet_launch.commands.psfleet_cli import psfleet as command_line
from tests.programs import ended
from tests.server_channels import ServerChannel
from tests.serving import models
from tests.standby.pairs import Pairs
from tests.waiting import pause, until

Floats = NDArray[np.float32]
Values = tuple[Floats, Floats, Floats]

SEEDS = range(20 if os.environ.get("PSFLEET_TORTURE") else 1)
IDS = np.arange(-100, 200)
FIRST = InitializerSpec("uniform", -0.1, 0.1)
ROWS = TableSpec("rows", "sparse", (5,), make_rule("adam", {}), initializer=FIRST, seed=3)
FEW = TableSpec(
    "few", "sparse", (3,), make_rule("adagrad", {}), initializer=FIRST, entry=CapacityEntry(40)
)
DENSE = TableSpec("dense", "dense", (9000,), make_rule("adam", {}))


class Trainer:
    """One worker that knows the weights after each of its pushes.

    Attributes:
        values: The weights by number of the push.
    """

    def __init__(self, runtime: Runtime, seed: int = 0) -> None:
        self.runtime = runtime
        self._dice = np.random.default_rng(seed)
        for spec in (ROWS, FEW):
            runtime.create(spec)
        runtime.create(DENSE, np.linspace(-1, 1, 9000, dtype=np.float32))
        self.values: list[Values] = [self.read()]

    def read(self) -> Values:
        """The weights of all ids, with rows or without."""
        reads = [Read(ROWS.key, IDS), Read(FEW.key, IDS), Read(DENSE.key)]
        rows, few, dense = self.runtime.pull(reads)
        return rows, few, dense

    def step(self) -> None:
        """One push, to some of the ids; the smaller table lets rows go for it."""
        gradients = []
        for spec in (ROWS, FEW):
            ids = self._dice.choice(IDS, 12, replace=False)
            gradients.append(Gradient(spec.key, self._noise(12, spec.dim), ids, 0.05))
        gradients.append(Gradient(DENSE.key, self._noise(9000), None, 0.01))
        self.runtime.push(gradients).wait()
        self.values.append(self.read())

    def _noise(self, *shape: int) -> Floats:
        return self._dice.standard_normal(shape, np.float32)


def copied(follower: Follower) -> tuple[FollowedCut, Values]:
    """The cut of a follower, and its weights."""
    with follower.held():
        values = (
            follower.look_up("rows", IDS),
            follower.look_up("few", IDS),
            follower.dense("dense"),
        )
        return follower.position, values


@contextlib.contextmanager
def watched(follower: Follower) -> Iterator[list[tuple[FollowedCut, Values]]]:
    """What a follower has at each cut meanwhile, and in the end."""
    cuts: list[tuple[FollowedCut, Values]] = []
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            cut, values = copied(follower)
            if not cuts or cut.number > cuts[-1][0].number:
                cuts.append((cut, values))
            over.wait(0.005)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield cuts
    finally:
        over.set()
        thread.join()
        cuts.append(copied(follower))


def check_round(cut: FollowedCut, values: Values, expected: list[Values]) -> None:
    """Sync mode: the weights are those of the round, bit for bit."""
    assert cut.round is not None
    for mine, wanted in zip(values, expected[cut.round], strict=True):
        np.testing.assert_array_equal(mine.view(np.uint32), wanted.view(np.uint32))


def check_pushes(cut: FollowedCut, values: Values, expected: list[Values]) -> None:
    """Other modes: the rows of each server are those after the last push in its part of the cut."""
    assert cut.round is None
    for server, pushes in enumerate(cut.pushes):
        [(_, last)] = pushes.values()
        own = owned_by(IDS, server, len(cut.pushes))
        for mine, wanted in zip(values[:2], expected[last][:2], strict=True):
            np.testing.assert_array_equal(mine[own], wanted[own])


@pytest.mark.parametrize(("mode", "check"), [("sync", check_round), ("async", check_pushes)])
def test_each_cut_is_the_training(mode: str, check: Callable[..., None]) -> None:
    """At each cut rows, rows that have gone and dense values are those of the training.

    A table that is made later reaches the follower too.
    """
    with LocalFleet(servers=2, workers=1, in_process=True) as fleet:
        trainer = Trainer(fleet.connect(0, mode))
        trainer.step()
        with Follower(fleet.endpoints, interval=0.02) as follower:
            with watched(follower) as actual:
                for step in range(60):
                    trainer.step()
                    if step == 30:
                        until(lambda: len(actual) > 1)
                follower.await_cut(61 if mode == "sync" else 2 * 61)
            for cut, values in actual:
                check(cut, values, trainer.values)
            assert len({cut.number for cut, _ in actual}) > 2
            assert follower.gaps == 0
            later = TableSpec("later", "sparse", (2,), make_rule("sgd", {}), initializer=FIRST)
            trainer.runtime.create(later)
            until(lambda: "later" in follower.specs())
            [first] = trainer.runtime.pull([Read(later.key, IDS)])
            np.testing.assert_array_equal(follower.look_up("later", IDS), first)
        trainer.runtime.close()


@pytest.mark.parametrize(("mode", "check"), [("sync", check_round), ("async", check_pushes)])
def test_begins_with_a_snapshot(mode: str, check: Callable[..., None]) -> None:
    """A follower that reads the newest snapshot has each cut exactly, and takes no row from the servers but
    those that have changed since. A snapshot of which the servers do not know is not used.
    """
    local: dict[str, Any] = {"workers": 1, "in_process": True}
    with LocalFleet(servers=2, snapshot_every="20 rounds", **local) as fleet:
        trainer = Trainer(fleet.connect(0, mode))
        for _ in range(25):
            trainer.step()
        until(lambda: any(fleet.snapshots.glob("snapshot-*/manifest.json")))
        for _ in range(3):
            trainer.step()
        begins: dict[str, Any] = {"interval": 0.02, "snapshot": str(fleet.snapshots)}
        with Follower(fleet.endpoints, **begins) as follower, watched(follower) as actual:
            assert follower.snapshot == str(max(fleet.snapshots.glob("snapshot-*")))
            for _ in range(9):
                trainer.step()
            follower.await_cut(37 if mode == "sync" else 2 * 37)
        for cut, values in actual:
            check(cut, values, trainer.values)
        with Follower(fleet.endpoints, part=(1, 3), **begins) as follower:
            own = owned_by(IDS, 1, 3)
            np.testing.assert_array_equal(
                follower.look_up("rows", IDS[own]), trainer.values[-1][0][own]
            )
        with LocalFleet(servers=2, **local) as other:
            another = Trainer(other.connect(0, mode))
            with Follower(other.endpoints, **begins) as follower:
                assert follower.snapshot == ""
                check(*copied(follower), another.values)
            another.runtime.close()
        trainer.runtime.close()


def test_parts_and_forms() -> None:
    """Followers that share the ids have each its own rows, in int8 to half a step; a client only reads."""
    with LocalFleet(servers=2, workers=1, in_process=True) as fleet:
        trainer = Trainer(fleet.connect(0, "async"))
        for _ in range(5):
            trainer.step()
        rows, _, dense = trainer.values[-1]
        for part in range(3):
            with Follower(fleet.endpoints, rows="int8", part=(part, 3)) as follower:
                own = owned_by(IDS, part, 3)
                error = np.abs(follower.look_up("rows", IDS[own]) - rows[own]).max(axis=1)
                assert (error <= np.abs(rows[own]).max(axis=1) / 253).all()
                other = f"keeps part {part + 1}/3 of the ids, and id {IDS[~own][0]} of table 'rows'"
                with pytest.raises(UsageError, match=other):
                    follower.look_up("rows", IDS)
                np.testing.assert_array_equal(follower.dense("dense"), dense)
        with psfleet.connect(follow=fleet.endpoints) as client:
            table = client.sparse_table("rows", 5)
            np.testing.assert_array_equal(table.pull(IDS), rows)
            assert client.cut is not None
            assert client.cut.pushes == ({0: (1, 5)}, {0: (1, 5)})
            with pytest.raises(UsageError, match="can be read and not pushed to"):
                table.push(IDS, rows)
        with pytest.raises(ConfigError, match="leave the others out"):
            psfleet.connect(follow=fleet.endpoints, mode="sync")
        trainer.runtime.close()


def test_readers_only_read(tmp_path: Path) -> None:
    """With the credentials of readers one follows the job, and is refused all else in one sentence."""
    folders = make_credentials(tmp_path)
    tls = {role: folders[role] for role in ("server", "worker")}
    with LocalFleet(1, 1, "tcp", credentials=tls, in_process=True) as fleet:
        trainer = Trainer(fleet.connect(0, "async"))
        trainer.step()
        reader = dataclasses.replace(fleet.environment(0), tls=str(folders["reader"]))
        with Follower(fleet.endpoints, tls=str(folders["reader"])) as follower:
            follower.await_cut(1)
            check_pushes(*copied(follower), trainer.values)
        only = r"the call was refused: its token is that of readers, which only follow the job"
        with pytest.raises(AccessDenied, match=only):
            load_runtime("cluster", reader, "async")
        access = Access.of(reader)
        with ServerChannel(fleet.endpoints[0], access) as channel:
            for method in ("Push", "Pull", "CreateTable", "WriteState", "Load", "Shrink", "Leave"):
                call = channel.unary_unary(f"/psfleet.v1.Shard/{method}", None, None)
                with pytest.raises(grpc.RpcError, match="token is that of readers"):
                    call(b"", metadata=access.metadata, timeout=60)
        trainer.step()
        trainer.runtime.close()


def test_closed_while_it_connects_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A follower that finds its job elsewhere while it is closed leaves no connection."""
    with LocalFleet(1, 1, in_process=True) as fleet:
        trainer = fleet.connect(0, "async")
        follower = Follower(fleet.endpoints)
        actual, searching = (
            dataclasses.replace(follower._environment, job="elsewhere"),
            threading.Event(),
        )

        def fail() -> None:
            raise ServerUnavailable("server 0 is gone")

        def find() -> Environment:
            searching.set()
            assert follower._closing.wait(60)
            return actual

        monkeypatch.setattr(follower, "_find", find)
        monkeypatch.setattr(follower, "_follow", fail)
        assert searching.wait(60)
        follower.close()
        assert follower._environment is actual
        trainer.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_servers_die(seed: int) -> None:
    """Async: servers with a log are killed at any moment: each cut that was announced is the training's."""
    dice = random.Random(seed)
    with LocalFleet(servers=2, workers=1, durability="log") as fleet, fleet.reviving():
        trainer = Trainer(fleet.connect(0, "async"), seed)
        deaths = dict(zip(dice.sample(range(5, 40), 2), (0, 1), strict=True))
        with Follower(fleet.endpoints, interval=0.02) as follower:
            with watched(follower) as actual:
                for step in range(40):
                    if step in deaths:
                        fleet.kill(deaths[step])
                    trainer.step()
                follower.await_cut(80)
            for cut, values in actual:
                check_pushes(cut, values, trainer.values)
            assert follower.gaps >= 1
        trainer.runtime.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_standby_takes_over(seed: int) -> None:
    """Sync: a server dies whose standby takes over: each cut that was announced is the training's."""
    died = random.Random(seed).randrange(5, 30)
    with Pairs(2, 1) as fleet:
        fleet.await_standbys()
        with fleet.deciding():
            trainer = Trainer(fleet.connect(0, "sync"), seed)
            with Follower(fleet.endpoints, interval=0.02) as follower:
                with watched(follower) as actual:
                    for step in range(40):
                        if step == died:
                            fleet.process(1).kill()
                        trainer.step()
                    follower.await_cut(40)
                for cut, values in actual:
                    check_round(cut, values, trainer.values)
            trainer.runtime.close()
            fleet.await_end()
        assert fleet.takeovers == 1


def test_served_parts() -> None:
    """`psfleet serve --follow JOB --part`: one client asks each process for its ids.

    Each process counts the ages of the rows that it gave.
    """
    pytest.importorskip("httptools", reason="httptools is not installed")
    pytest.importorskip("grpc_health", reason="grpcio-health-checking is not installed")
    pytest.importorskip("grpc_reflection", reason="grpcio-reflection is not installed")
    from psfleet.serving.serving_client import SplitClient

    with (
        LocalFleet(servers=2, workers=1, in_process=True) as fleet,
        contextlib.ExitStack() as stack,
    ):
        trainer = Trainer(fleet.connect(0, "sync"))
        trainer.step()
        line = ("serve", "--follow", ",".join(fleet.endpoints), "--port", "0", "--http-port", "0")
        ports = [stack.enter_context(serving(*line, "--part", f"{k}/2")) for k in (1, 2)]
        with SplitClient([grpc for _, grpc, _ in ports]) as client:
            for _ in range(5):
                trainer.step()
            rows = trainer.values[-1][0]
            until(lambda: np.array_equal(client.look_up("rows", IDS), rows))
            with pytest.raises(UsageError, match="gives rows only"):
                client.part(0).predict({"x": [1]})
        with urllib.request.urlopen(f"http://{ports[0][2]}/metrics") as reply:
            [row_ages] = [
                line
                for line in reply.read().decode().splitlines()
                if line.startswith('psfleet_serving_row_age_seconds_count{model="rows"}')
            ]
        assert float(row_ages.split()[1]) >= len(IDS) // 4
        ports[0][0].kill()
        trainer.step()
        trainer.runtime.close()


def test_a_part_is_of_a_job_that_is_followed(tmp_path: Path) -> None:
    """`--part` without `--follow` is refused; it would serve all rows."""
    pytest.importorskip("httptools", reason="httptools is not installed")
    pytest.importorskip("grpc_health", reason="grpcio-health-checking is not installed")
    with pytest.raises(ConfigError, match="--part is '2/4'; it goes with --follow: leave it out"):
        command_line.main(["serve", str(tmp_path), "--part", "2/4"], standalone_mode=False)


def test_a_thread_that_fails_ends_the_service(tmp_path: Path) -> None:
    """An unexpected error in a thread of a service is one line in its log, and ends it with code 1."""
    pytest.importorskip("httptools", reason="httptools is not installed")
    pytest.importorskip("grpc_health", reason="grpcio-health-checking is not installed")
    pytest.importorskip("grpc_reflection", reason="grpcio-reflection is not installed")
    models.train(tmp_path)
    with LocalFleet(servers=1, workers=1) as fleet:
        runtime = fleet.connect(0, "sync")
        model = (str(tmp_path / "model"), "--features", "tests.serving.models:FEATURES")
        follow = ("--follow", fleet.endpoints[0])
        for name, source in (("versions", model), ("follower", follow)):
            command = [
                sys.executable,
                "-m",
                "psfleet_launch.commands.psfleet_cli",
                "serve",
                *source,
                "--port",
                "0",
            ]
            ports = ["--http-port", "0"]
            process = ended(
                [*command, *ports], env={**os.environ, "PSFLEET_CRASH": f"thread {name}:1:raise"}
            )
            assert process.returncode == 1, name
            assert f"thread {name!r} has failed" in process.stderr, process.stderr
        runtime.close()


def test_a_stopped_follower_holds_nobody_up() -> None:
    """A service that follows and is stopped for long: all pushes go on, and the server keeps little of what
    has changed. When the service goes on it gets that, without a new copy. Asked to end, it ends.
    """
    for name in ("httptools", "grpc_health", "grpc_reflection"):
        pytest.importorskip(name)
    spec = TableSpec("many", "sparse", (4,), make_rule("sgd", {}))
    ids = np.arange(100_000)
    with LocalFleet(servers=1, workers=1) as fleet:
        runtime = fleet.connect(0, "async")
        runtime.create(spec)
        gradient = Gradient(spec.key, np.ones((len(ids), 4), np.float32), ids, 0.5)
        runtime.push([gradient]).wait()
        line = ("serve", "--follow", fleet.endpoints[0], "--port", "0", "--http-port", "0")
        with serving(*line) as (process, grpc_address, http):
            with psfleet.serving.ServingClient(grpc_address) as client:
                until(lambda: len(client.look_up("many", ids[:1])) == 1)
            pause(process)
            before = resident(fleet.processes[0].pid)
            for _ in range(45):
                runtime.push([gradient]).wait(timeout=60)
            assert resident(fleet.processes[0].pid) - before < 50 << 20
            process.send_signal(signal.SIGCONT)
            [expected] = runtime.pull([Read(spec.key, ids[-9:])])
            with psfleet.serving.ServingClient(grpc_address) as client:
                until(lambda: (client.look_up("many", ids[-9:]) == expected).all())
            with urllib.request.urlopen(f"http://{http}/metrics", timeout=60) as reply:
                assert b'psfleet_serving_gaps_total{model="rows"} 0.0' in reply.read()
            pause(process)
        assert process.returncode == 0
        runtime.close()


def resident(pid: int) -> int:
    """Bytes of memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


@contextlib.contextmanager
def serving(*line: str) -> Iterator[tuple["subprocess.Popen[str]", str, str]]:
    """A process of the command, and its addresses of gRPC and HTTP."""
    command = [sys.executable, "-m", "psfleet_launch.commands.psfleet_cli", *line]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        output = process.stdout.readline()
        grpc, _, http = output.partition("gRPC ")[2].partition(", HTTP ")
        yield process, grpc, http.strip()
    finally:
        process.send_signal(signal.SIGCONT)  # a test may have stopped it
        process.terminate()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
