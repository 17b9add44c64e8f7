"""An agent between its launcher, which sends messages at any time, and its processes."""

import os
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from psfleet.core.net.connections.access import Access
from psfleet.core.net.connections.certificates import make_credentials
from psfleet.core.net.connections.credentials import Credentials
from psfleet_launch.agent.agent import Agent
from psfleet_launch.agent.launcher_link import LauncherLink
from psfleet_launch.engines.remote import agent_hub
from psfleet_launch.engines.remote.agent_hub import AgentConnection, AgentHub
from psfleet_launch.engines.remote.agent_messages import (
    AgentMessage,
    Expect,
    Hello,
    LauncherMessage,
    OpenJob,
    OutputChunk,
    Spawn,
    Sweep,
    Swept,
    write_request,
)
from psfleet_launch.engines.remote.machine import describe
from psfleet_launch.job.job_plan import Member, Told
from psfleet_launch.job.job_request import JobRequest
from psfleet_launch.supervision.job_events import ProcessExited
from tests.waiting import until

WORKER = Member("worker", 0)
SERVER = Member("server", 0)
Messages = list[AgentMessage]


def attend(script: Path, last: type, look: Callable[[AgentConnection, Messages], None]) -> Messages:
    """Run an agent of one worker in this thread; the messages until one of the class `last`.

    Args:
        look: Is called about every millisecond with the messages so far, by the launcher's side.
    """
    folder = script.parent
    opened = OpenJob(
        request=write_request(JobRequest(str(script))),
        name="j",
        token="t",
        working_folder=str(folder),
        logs=str(folder / "logs"),
        variables=dict(os.environ),
        workers=1,
    )
    spawn = Spawn(WORKER, Told(["127.0.0.1:1"]))
    folders = make_credentials(folder / "tls")
    woken = threading.Semaphore(0)
    hub = AgentHub(Access(Credentials.read(folders["server"])), woken.release)
    endpoint = hub.listen("127.0.0.1:0")
    messages: Messages = []
    over = threading.Event()

    def serve() -> None:
        agent: AgentConnection | None = None
        while not (over.is_set() or (messages and isinstance(messages[-1], last))):
            woken.acquire(timeout=0.001)
            for connection, message in hub.take():
                assert message is not None
                messages.append(message)
                if isinstance(message, Hello):
                    agent = connection
                    agent.send(opened)
                    agent.send(spawn)
            if agent is not None:
                look(agent, messages)
        hub.close()

    thread = threading.Thread(target=serve)
    thread.start()
    link = LauncherLink(endpoint, Access(Credentials.read(folders["worker"])))
    (folder / "agent").mkdir()
    link.connect(describe("alpha", "127.0.0.1", endpoint))
    try:
        Agent(link, folder / "agent", "alpha").run()
    finally:
        over.set()
        thread.join()
    return messages


def test_messages_while_the_shown_worker_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent to which the launcher sends messages without a pause tells it that the shown worker has ended,
    with its last words."""
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "script.py"
    script.write_text("print('last words')")
    expect = Expect(SERVER)
    messages = attend(script, ProcessExited, lambda agent, _: agent.send(expect))
    assert b"last words" in b"".join(
        message.data for message in messages if isinstance(message, OutputChunk)
    )
    assert isinstance(messages[-1], ProcessExited)
    assert messages[-1].code == 0


def test_a_worker_that_runs_when_the_job_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent kills it, and tells the launcher what it has used before it says that nothing is left."""
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "script.py"
    script.write_text("import time; print('runs', flush=True); time.sleep(100)")

    sweeps: list[LauncherMessage] = [Sweep()]

    def sweep_once(agent: AgentConnection, messages: Messages) -> None:
        if sweeps and any(isinstance(message, OutputChunk) for message in messages):
            agent.send(sweeps.pop())

    messages = attend(script, Swept, sweep_once)
    (exited,) = (message for message in messages if isinstance(message, ProcessExited))
    assert exited.code == -9
    assert re.fullmatch(r"\d+\.\d s of CPU, [1-9].* at most", exited.usage)
    assert isinstance(messages[-1], Swept)
    assert not messages[-1].left_behind


def test_one_agent_too_many_hears_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the most agents of a job the next one ends with a sentence; those before it stay."""
    monkeypatch.setattr(agent_hub, "MOST_AGENTS", 2)
    folders = make_credentials(tmp_path)
    hub = AgentHub(Access(Credentials.read(folders["server"])), lambda: None)
    endpoint = hub.listen("127.0.0.1:0")
    links: list[LauncherLink] = []
    for number in range(3):
        link = LauncherLink(endpoint, Access(Credentials.read(folders["worker"])))
        link.connect(describe(f"host {number}", "127.0.0.1", endpoint))
        until(lambda link=link: hub.take() or link.lost)  # type: ignore[misc]
        links.append(link)
    lost = [link.lost for link in links]
    for link in links:
        link.close()
    hub.close()
    assert lost == ["", "", "the launcher has 1,000 agents already, the most that a job can have"]
