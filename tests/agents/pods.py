"""Updates of pods as the API of Kubernetes 1.33 writes them, less the fields that nobody reads."""

from typing import Any

__all__ = ["ended", "evicted", "pod", "ready", "running", "unschedulable", "update", "waiting"]

State = dict[str, Any]


def update(
    seat: str, *states: State, kind: str = "MODIFIED", uid: str = "", **status: Any
) -> State:
    """An update of the pod in a seat such as `server-0`, whose container has these states.

    Args:
        states: Of the container: the present one, and the last one if it has started again.
        status: Of the pod.
    """
    made = pod(seat, uid or f"{seat}-a")
    made["status"] |= {"phase": "Running"} | status
    if states:
        state, before = (*states, {})[:2]
        made["status"]["containerStatuses"] = [
            {
                "name": seat.partition("-")[0],
                "state": {name: value for name, value in state.items() if name != "ready"},
                "lastState": before,
                "ready": state.get("ready", False),
                "restartCount": int(bool(before)),
            }
        ]
    return {"type": kind, "object": made}


def pod(seat: str, uid: str) -> State:
    """The pod of a seat; server 0 is on node-0."""
    role, _, rank = seat.partition("-")
    index = {
        "server": "apps.kubernetes.io/pod-index",
        "worker": "batch.kubernetes.io/job-completion-index",
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"ctr-{seat}" if role == "server" else f"ctr-{seat}-{uid[-1] * 5}",
            "uid": uid,
            "labels": {"psfleet.job": "ctr", "psfleet.role": role, index[role]: rank},
        },
        "spec": {"nodeName": f"node-{rank}"},
        "status": {"phase": "Pending", "conditions": []},
    }


def running() -> State:
    """The container runs."""
    return {"running": {"startedAt": "2026-01-01T00:00:00Z"}}


def ready() -> State:
    """It runs and has passed its probe."""
    return running() | {"ready": True}


def ended(code: int, reason: str = "", message: str = "") -> State:
    """It has ended."""
    said = {"exitCode": code, "reason": reason or ("Error" if code else "Completed")}
    return {"terminated": said | ({"message": message} if message else {})}


def waiting(reason: str, message: str) -> State:
    """It has not started."""
    return {"waiting": {"reason": reason, "message": message}}


def unschedulable(message: str) -> State:
    """The status of a pod without a node."""
    told = {"reason": "Unschedulable", "message": message}
    return {"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "False", **told}]}


def evicted(message: str) -> State:
    """The status of a pod that its node has thrown out."""
    target = {"reason": "TerminationByKubelet", "message": message}
    return {
        "phase": "Failed",
        "reason": "Evicted",
        "message": message,
        "conditions": [{"type": "DisruptionTarget", "status": "True", **target}],
    }
