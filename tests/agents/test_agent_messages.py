"""An agent between its launcher, which sends messages at any time, and the output of its processes."""

import os
import threading
from pathlib import Path

import pytest

from psfleet.wire.connections.access import Access
from psfleet.wire.connections.certificates import make_credentials
from psfleet.wire.connections.credentials import Credentials
from psfleet.wire.v1 import agent_pb2 as pb
from psfleet_launch.agent.agent import Agent
from psfleet_launch.agent.launcher_link import LauncherLink
from psfleet_launch.agent.machine import describe
from psfleet_launch.engines.remote.agent_hub import AgentConnection, AgentHub
from psfleet_launch.engines.remote.agent_messages import write_request
from psfleet_launch.job.job_request import JobRequest

WORKER = pb.AgentMember(role="worker", stage=-1, copy=-1)
SERVER = pb.AgentMember(role="server", stage=-1, copy=-1)


def test_messages_while_the_shown_worker_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent to which the launcher sends messages without a pause tells it that the shown worker has ended,
    with its last words."""
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "script.py"
    script.write_text("print('last words')")
    opened = pb.OpenJob(
        request=write_request(JobRequest(str(script))),
        name="j",
        token="t",
        working_folder=str(tmp_path),
        logs=str(tmp_path / "logs"),
        variables=dict(os.environ),
        workers=1,
    )
    folders = make_credentials(tmp_path / "tls")
    woken = threading.Semaphore(0)
    hub = AgentHub(Access(Credentials.read(folders["server"])), woken.release)
    endpoint = hub.listen("127.0.0.1:0")
    told: list[pb.AgentMessage] = []

    def launch(connection: AgentConnection) -> None:
        connection.send(pb.LauncherMessage(open=opened))
        connection.send(
            pb.LauncherMessage(spawn=pb.Spawn(member=WORKER, endpoints=["127.0.0.1:1"]))
        )

    def serve() -> None:
        connection: AgentConnection | None = None
        while not (told and told[-1].HasField("exited")):
            woken.acquire(timeout=0.0002)
            for connection, message in hub.take():
                if message is None:
                    return
                told.append(message)
                if message.HasField("hello"):
                    launch(connection)
            if connection is not None:
                connection.send(pb.LauncherMessage(expect=SERVER))
        hub.close()

    thread = threading.Thread(target=serve)
    thread.start()
    link = LauncherLink(endpoint, Access(Credentials.read(folders["worker"])))
    (tmp_path / "agent").mkdir()
    link.connect(describe("alpha", "127.0.0.1", endpoint))
    Agent(link, tmp_path / "agent", "alpha").run()
    thread.join()
    output = b"".join(message.output.data for message in told)
    assert b"last words" in output
    assert told[-1].exited.code == 0
