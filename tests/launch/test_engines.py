"""What a launch engine promises a supervisor, with real processes and without one."""

import selectors
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from psfleet_launch.engines.launch_engine import Engine, load_engine
from psfleet_launch.job.job_folder import private_folder
from psfleet_launch.job.job_plan import Job, Member, Told
from psfleet_launch.job.job_request import JobRequest
from psfleet_launch.supervision.job_events import Event, Output, ProcessExited, ServerReady, Shown

STAND_IN = str(Path(__file__).with_name("stand_in.py"))
SERVER, WORKER = Member("server", 0), Member("worker", 0)
Events = list[Event | Shown]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Engine]]:
    """Open an engine for a job of stand-ins; at the end no process of it is left."""
    monkeypatch.chdir(tmp_path)  # stand-ins leave files there
    opened: list[Engine] = []
    with private_folder() as folder, selectors.DefaultSelector() as selector:

        def begin(behaviour: str) -> Engine:
            asked = JobRequest(STAND_IN, (behaviour,), server_script=True)
            job = Job(asked, "j", f"token of {tmp_path}", folder, tmp_path)
            opened.append(load_engine("local")(job, selector))
            opened[-1].open()
            return opened[-1]

        yield begin
        for engine in opened:
            engine.sweep()
            engine.close()
            assert engine.left_behind() == []


def until(engine: Engine, enough: Callable[[Events], bool]) -> Events:
    """What happens until that is enough."""
    happened: Events = []
    deadline = time.monotonic() + 60
    while not enough(happened):
        assert time.monotonic() < deadline, happened
        for key, _ in engine.selector.select(min(engine.pause, 0.1)):
            key.data()
        happened += engine.events()
    return happened


def has_ended(member: Member) -> Callable[[Events], bool]:
    """Whether the events hold an end of that member."""
    return lambda events: any(isinstance(e, ProcessExited) and e.member == member for e in events)


def test_a_server_starts_again_beside_a_worker_that_has_left(start: Callable[..., Engine]) -> None:
    """What the workers have told stays when a server of the same rank gets a new process."""
    engine = start("hangs")
    engine.spawn(SERVER, Told(engine.endpoints()))
    engine.spawn(WORKER, Told(engine.endpoints()))
    until(engine, lambda events: any(isinstance(event, Output) for event in events))
    engine.job.left_file(WORKER).touch()
    engine.send(SERVER, signal.SIGKILL)
    until(engine, has_ended(SERVER))
    engine.spawn(SERVER, Told(engine.endpoints()))
    engine.send(WORKER, signal.SIGKILL)
    happened = until(engine, has_ended(WORKER))
    [exited] = [one for one in happened if isinstance(one, ProcessExited)]
    assert (exited.member, exited.code, exited.left) == (WORKER, -signal.SIGKILL, True)
    assert engine.has_joined()


def test_a_ready_server_is_expected_anew(start: Callable[..., Engine]) -> None:
    """After `expect` a server counts as ready only when it says so again, as a promoted standby does."""
    engine = start("hangs")
    engine.spawn(SERVER, Told(engine.endpoints()))
    ready = engine.job.ready_file(SERVER)
    until(engine, lambda events: ServerReady(SERVER, engine.endpoints()[0]) in events)
    text = ready.read_text()
    engine.expect(SERVER)
    assert not any(isinstance(event, ServerReady) for event in engine.events())
    ready.with_suffix(".draft").write_text(text)
    ready.with_suffix(".draft").rename(ready)
    until(engine, lambda events: ServerReady(SERVER, engine.endpoints()[0]) in events)
