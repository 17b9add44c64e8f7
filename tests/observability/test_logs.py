"""Logs: levels, form, what servers log of a job, and errors with the last events before them."""

import json
import logging
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import grpc
import numpy as np
import pytest

from psfleet.core.base.errors import ConfigError, Gap
from psfleet.core.base.logs import log_of, set_up_logs
from psfleet.core.engine.runtime_interface import Gradient
from psfleet.core.engine.shard.events import Push
from psfleet.core.net.v1 import coordinator_pb2
from tests.programs import ended
from tests.server.conftest import Peer, serving
from tests.server_channels import ServerChannel

KILLING = str(Path(__file__).parents[1] / "standby" / "scripts" / "killing.py")


@pytest.fixture(autouse=True)
def usual_logs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Logs as in a process of no fleet, before and after each test."""
    yield
    monkeypatch.undo()
    set_up_logs()


def test_a_script_alone_gets_plain_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a fleet a line is what was logged, and a script's own handlers get none of it."""
    log_of("psfleet.fleet.x").warning("psfleet: 3% of it", extra={"round": 7})
    assert capsys.readouterr().err == "psfleet: 3% of it\n"
    assert not logging.getLogger("psfleet").propagate


def test_a_process_of_a_fleet_says_when_and_who(capsys: pytest.CaptureFixture[str]) -> None:
    """Its lines begin with time, level, role and rank and end with step, round and snapshot."""
    set_up_logs("server", 3)
    log_of("psfleet_server.x").info("done", extra={"round": 7, "snapshot": 2, "bytes": 9})
    line = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} INFO server\.3 done \[round=7 snapshot=2\]\n"
    assert re.fullmatch(line, capsys.readouterr().err)


def test_each_logger_has_its_level(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PSFLEET_LOG names the level of all and of parts; what is set up later counts alone."""
    loggers = [log_of(name) for name in ("psfleet_server.a", "psfleet_worker.a", "psfleet.fleet")]

    def logged(levels: str) -> str:
        monkeypatch.setenv("PSFLEET_LOG", levels)
        set_up_logs()
        for log in loggers:
            log.debug(f"{log.name} debug")
            log.warning(f"{log.name} warning")
        return capsys.readouterr().err.replace("psfleet.", "").replace("\n", ", ")

    assert logged("error, psfleet.server=debug,psfleet.worker=warning") == (
        "server.a debug, server.a warning, worker.a warning, "
    )
    assert logged("") == "server.a warning, worker.a warning, fleet warning, "
    assert logged("off") == ""


@pytest.mark.parametrize("levels", ["loud", "torch=debug", "psfleet.server=", "psfleetish=info"])
def test_a_level_that_is_none_is_refused(levels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sentence quotes the value and says what can be given."""
    monkeypatch.setenv("PSFLEET_LOG", levels)
    said = f"PSFLEET_LOG is {levels!r}; it must be debug, info, warning, error or off"
    with pytest.raises(ConfigError, match=re.escape(said)):
        set_up_logs()


def test_an_error_is_one_json_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its traceback, where it has one."""
    monkeypatch.setenv("PSFLEET_LOG_FORMAT", "json")
    set_up_logs("worker", 1)
    try:
        np.zeros(3)[4]
    except IndexError as error:
        log_of("psfleet_worker.x").error("it failed", exc_info=error, extra={"step": np.int64(4)})
    [line] = map(json.loads, capsys.readouterr().err.splitlines())
    assert (line["level"], line["logger"], line["process"]) == (
        "error",
        "psfleet.worker.x",
        "worker.1",
    )
    assert line["text"] == "it failed"
    assert "IndexError" in line["traceback"]


def test_the_log_of_a_job_tells_what_happened_to_it(tmp_path: Path) -> None:
    """Joins, snapshots with seconds and bytes, the takeover and who has left, each a line of JSON."""
    command = [sys.executable, "-m", "psfleet_launch", "--servers", "2", "--workers", "2"]
    command += ["--no-progress", "--log-dir", str(tmp_path), "--replicas", "1"]
    command += [KILLING, "5:KILL:ready.0:ready.0.1"]
    variables = {"PSFLEET_LOG_FORMAT": "json", "PSFLEET_LOG": "warning,psfleet.server=info"}
    done = ended(command, env={**os.environ, **variables, "SNAPSHOT": str(tmp_path / "snapshot")})
    assert done.returncode == 0, done.stderr
    lines = [
        {"file": path.name, **json.loads(line)}
        for path in sorted(tmp_path.glob("*/serverlog.*"))
        for line in path.read_text().splitlines()
    ]

    def found(text: str) -> list[dict[str, Any]]:
        return [line for line in lines if re.search(text, line["text"])]

    assert {(line["process"], line["worker"]) for line in found("has joined as incarnation")} >= {
        (f"server.{server}", worker) for server in (0, 1) for worker in (0, 1)
    }
    [takeover] = found("takes over from its primary, with term 2")
    assert (takeover["level"], takeover["file"]) == ("warning", "serverlog.0.copy.1")
    begun, complete = found("snapshot . begins"), found(r"snapshot . is complete: [\d,]+ bytes in")
    assert {line["snapshot"] for line in complete} <= {line["snapshot"] for line in begun}
    assert complete
    assert all(line["bytes"] > 36_000 and line["seconds"] >= 0 for line in complete)
    assert {line["process"] for line in found("its part is written")} == {"server.0", "server.1"}
    assert found("worker 1 has left")
    assert found("server 1 of 2 ready at")


def gap(worker_incarnation: int) -> Push:
    """A push that skips those before it."""
    return Push(0, worker_incarnation, 5, ())


def test_an_error_brings_the_last_events(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A gap in pushes or collectives is in the server's log, with what came before it."""
    with serving(tmp_path, 1) as server, ServerChannel(server.endpoint) as channel:
        peer = Peer(channel)
        incarnation = peer.join(0)
        with pytest.raises(Gap) as shards:
            server.host.ask(gap(incarnation))
        arrival = coordinator_pb2.BarrierRequest(worker=0, incarnation=incarnation, number=9)
        with pytest.raises(grpc.RpcError):
            peer.coordinator.Barrier(arrival)
        said = capsys.readouterr().err
    [note] = shards.value.__notes__
    assert f"Join(worker=0, incarnation={incarnation}" in note
    assert note.endswith(f"Push(worker=0, incarnation={incarnation}, sequence=5)")
    assert "refused a call: Gap: " in said
    assert re.search(r"last events, the newest last:\n  .*register\(0, 7, 1\)", said, re.DOTALL)
    assert f"  arrive(Arrival(worker=0, incarnation={incarnation}, number=9" in said


def test_a_push_logs_nothing_and_remembers_itself_with_one_call(tmp_path: Path) -> None:
    """The server calls nothing of logging for a push, and one function for the ring of last events."""
    with serving(tmp_path, 1) as server, ServerChannel(server.endpoint) as channel:
        peer = Peer(channel)
        incarnation = peer.join(0)
        table = peer.create("w", "dense", (4,), np.zeros(4, "<f4").tobytes())
        pushes = [
            Push(0, incarnation, number, (Gradient(table, np.ones(4, np.float32), None, 0.1),))
            for number in (1, 2)
        ]
        server.host.ask(pushes[0])
        calls: Counter[str] = Counter()

        def count(frame: FrameType, event: str, _: object) -> None:
            calls[Path(frame.f_code.co_filename).name] += event == "call"

        sys.setprofile(count)
        try:
            server.host.ask(pushes[1])
        finally:
            sys.setprofile(None)
    assert calls["shard.py"] > 1
    assert calls["recent_events.py"] == 1
    assert not {"logs.py", "replies.py", "__init__.py"} & calls.keys()
