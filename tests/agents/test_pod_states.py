"""What updates of pods mean, without a cluster."""

import json
from typing import Any

import pytest

from psfleet_launch.engines.remote.kubectl import Objects
from psfleet_launch.engines.remote.pod_states import TRIES, PodLog, PodStates
from psfleet_launch.job.job_plan import Member
from psfleet_launch.supervision.job_events import ProcessExited, Said, ServerReady
from tests.agents.pods import ended, evicted, ready, running, unschedulable, update, waiting

SERVER, WORKER = Member("server", 0), Member("worker", 0)


def states(keeps_log: bool = False) -> PodStates:
    """Of a job with one server and one worker."""
    return PodStates("ctr", [SERVER, WORKER], keeps_log)


def play(found: PodStates, *steps: Any) -> list[Any]:
    """What some updates mean."""
    return [change for step in steps for change in found.update(step["type"], step["object"])]


def test_a_life_is_told_once() -> None:
    """However often the same state comes, as when a watch starts anew."""
    found = states()
    once = play(found, update("server-0", ready()), update("server-0", ended(0)))
    log = PodLog(SERVER, "ctr-server-0", "server-0-a", 0, previous=False)
    assert once == [log, ServerReady(SERVER), ProcessExited(SERVER, 0)]
    again = [update("server-0", ended(0), kind="ADDED"), update("server-0", ready())]
    assert play(found, *again) == []
    assert found.hosts == {SERVER: "node-0"}


@pytest.mark.parametrize(
    ("end", "exited"),
    [
        (update("server-0", running(), kind="DELETED"), (-9, "its pod was deleted")),
        (update("server-0", phase="Failed", reason="NodeLost"), (-9, "NodeLost")),
        (
            update("server-0", **evicted("no room")),
            (-9, "it was taken off its node: Evicted: no room"),
        ),
        (
            update("server-0", ended(128, "StartError", "no psfleet")),
            (128, "StartError: no psfleet"),
        ),
        (
            update("server-0", ended(137, "OOMKilled")),
            (-9, "the memory of its container has run out (OOMKilled)"),
        ),
        (update("server-0", ended(1)), (1, "")),
        (update("server-0", ended(143)), (-15, "")),
    ],
)
def test_why_a_server_has_ended(end: Any, exited: tuple[int, str]) -> None:
    """Signals are negative; there is a cause where the exit code does not say it."""
    code, cause = exited
    found = states()
    play(found, update("server-0", ready()))
    assert play(found, end) == [ProcessExited(SERVER, code, cause=cause)]


def test_a_container_that_has_started_again_before_anybody_saw_it_end() -> None:
    """The end of the life before, its log and the new life are told in this order."""
    found = states(keeps_log=True)
    play(found, update("server-0", ready()))
    first, *rest = play(found, update("server-0", ready(), ended(137)))
    assert first == ProcessExited(SERVER, -9)
    log = PodLog(SERVER, "ctr-server-0", "server-0-a", 1, previous=False)
    assert rest == [log, ServerReady(SERVER)]
    unseen = play(states(keeps_log=True), update("server-0", running(), ended(1)))
    before = PodLog(SERVER, "ctr-server-0", "server-0-a", 0, previous=True)
    assert unseen[:2] == [before, ProcessExited(SERVER, 1)]


def test_a_pod_in_the_place_of_another() -> None:
    """If nobody has seen the first one end, it counts as killed; what is said of it later is old."""
    found = states()
    play(found, update("worker-0", running()))
    changes = play(found, update("worker-0", running(), uid="worker-0-b"))
    assert changes[0] == ProcessExited(WORKER, -9, cause="its pod was replaced")
    assert play(found, update("worker-0", ended(1))) == []


@pytest.mark.parametrize("keeps_log", [False, True])
def test_an_eviction_costs_only_servers_without_a_log(keeps_log: bool) -> None:
    """Kubernetes starts the others again, and that is no exit."""
    found = states(keeps_log)
    play(found, update("server-0", ready()), update("worker-0", running()))
    gone = [update(seat, ended(137), **evicted("no room")) for seat in ("server-0", "worker-0")]
    server, worker = play(found, *gone)
    why = "it was taken off its node: Evicted: no room"
    again = f"{why}; Kubernetes starts it again"
    lost = ProcessExited(SERVER, -9, cause=why)
    assert server == (Said(SERVER, again) if keeps_log else lost)
    assert worker == Said(WORKER, again)


def test_a_node_that_is_lost() -> None:
    """The pod vanishes; its condition says why."""
    found = states()
    lost = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}
    gone = update("server-0", ready(), kind="DELETED", conditions=[lost])
    *_, exited = play(found, gone)
    cause = "it was taken off its node: DeletionByTaintManager"
    assert exited == ProcessExited(SERVER, -9, cause=cause)


def test_pods_that_vanish_at_the_end() -> None:
    """A server that is deleted when all workers are done has ended well; in a deletion all are stopped."""
    found = states()
    play(found, update("server-0", ready()), update("worker-0", ended(0)))
    assert play(found, update("server-0", ready(), kind="DELETED")) == [ProcessExited(SERVER, 0)]
    found = states()
    play(found, update("server-0", ready()))
    found.is_stopping = True
    gone = play(found, update("server-0", ready(), kind="DELETED"))
    assert gone == [ProcessExited(SERVER, -15)]


def test_what_a_pod_waits_for_is_said_once() -> None:
    """Starting is not waiting."""
    found = states()
    starts = update("server-0", waiting("ContainerCreating", ""))
    no_node = update("server-0", **unschedulable("no node\nhas room"))
    no_volume = update("server-0", waiting("CreateContainerConfigError", "no secret"))
    assert play(found, no_node, no_node, starts, no_volume, no_volume) == [
        Said(SERVER, "waits: Unschedulable: no node has room"),
        Said(SERVER, "waits: CreateContainerConfigError: no secret"),
    ]


def test_an_image_is_fatal_at_first_only() -> None:
    """A process that has run before may wait for its new node to get the image."""
    back_off = waiting("ImagePullBackOff", "not found")
    (exited,) = play(states(), update("worker-0", back_off))
    cause = "its image cannot be pulled: ImagePullBackOff: not found"
    assert exited == ProcessExited(WORKER, 1, cause=cause, is_final=True)
    found = states()
    play(found, update("worker-0", running()), update("worker-0", ended(1)))
    again = play(found, update("worker-0", back_off, uid="worker-0-b"))
    assert again == [Said(WORKER, "waits: ImagePullBackOff: not found")]


def test_a_cluster_that_cannot_be_reached() -> None:
    """It is said once; after many failures in a row the members count as lost, for good."""
    found = states()
    play(found, update("worker-0", ended(0)))
    (said,) = found.disconnect("refused")
    assert said == Said(None, "kubectl: refused; trying again")
    play(found, update("server-0", ready()))
    changes = [change for _ in range(TRIES) for change in found.disconnect("refused")]
    cause = "the cluster cannot be reached: refused"
    assert changes == [said, ProcessExited(SERVER, -9, cause=cause, is_final=True)]


def test_a_job_that_kubernetes_gives_up() -> None:
    """Its event is an end; that of another job is nothing."""
    found = states()
    event = {"involvedObject": {"kind": "Job", "name": "ctr-worker"}, "reason": "FailedIndexes"}
    assert found.warn(event) == ("Job ctr-worker: FailedIndexes", True)
    other = event | {"involvedObject": {"kind": "Job", "name": "more-ctr-worker"}}
    assert found.warn(other) == ("", False)


def test_objects_in_pieces() -> None:
    """Wherever a stream is cut, also within a character, the same objects come."""
    wanted = [{"text": "ä }{ \\"}, {"n": [1, {}]}, {}]
    stream = "\n".join(json.dumps(one, indent=2, ensure_ascii=False) for one in wanted).encode()
    for size in range(1, len(stream) + 1):
        objects = Objects()
        pieces = [stream[start : start + size] for start in range(0, len(stream), size)]
        assert [one for piece in pieces for one in objects.feed(piece)] == wanted
