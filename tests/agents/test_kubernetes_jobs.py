"""Jobs that `--engine kubernetes` creates, watches and deletes, with a kubectl that replays a replay."""

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from psfleet_launch.commands.launch_command import main
from tests.agents.conftest import TRAINER, Site
from tests.agents.pods import ended, evicted, ready, running, unschedulable, update, waiting
from tests.launch.conftest import Launcher

KUBECTL = Path(__file__).with_name("replay_kubectl.py")
INDEX = "batch.kubernetes.io/job-completion-index"
JOB = ("--engine", "kubernetes", "--image", "registry.example/psfleet:1", "--job", "ctr")
TWO = ("--servers", "2", "--workers", "2")
STARTED = [
    update("server-0", ready(), kind="ADDED"),
    update("server-1", ready(), kind="ADDED"),
    update("worker-0", running(), kind="ADDED"),
    update("worker-1", running(), kind="ADDED"),
]
DONE = [update(f"worker-{rank}", ended(0), phase="Succeeded") for rank in (0, 1)]
DONE += [update(f"server-{rank}", ended(0)) for rank in (0, 1)]
TRACEBACK = (
    "Traceback (most recent call last):\n"
    '  File "/job/trainer.py", line 7, in <module>\n'
    "ValueError: no such column 'cost'\n"
)
LOW = "The node was low on resource: memory."
MISSING_IMAGE = 'Back-off pulling image "registry.example/psfleet:1": not found'
NO_NODE = "0/3 nodes are available: 3 Insufficient memory."


class Cluster:
    """A folder with the script of a replay.

    Attributes:
        folder: Holds the script, and what was done.
    """

    def __init__(self, folder: Path, site: Site) -> None:
        self.folder = folder / "cluster"
        self.site = site
        bin = folder / "bin"
        for made in (self.folder, bin):
            made.mkdir()
        (bin / "kubectl").symlink_to(KUBECTL)
        self.variables = {
            "FAKE_CLUSTER": str(self.folder),
            "PATH": f"{bin}{os.pathsep}{os.environ['PATH']}",
        }

    def launch(self, pods: list[Any], *options: str, **files: Any) -> Launcher:
        """Start a job whose pods do this."""
        for name, content in {"pods": pods, **files}.items():
            (self.folder / f"{name}.json").write_text(json.dumps(content))
        for step in pods:
            if "object" in step:
                name = step["object"]["metadata"]["name"]
                log = TRACEBACK if "worker-1" in name else f"this is {name}\n"
                (self.folder / f"{name}.log").write_text(log)
        return self.site.start(*JOB, *TWO, *options, TRAINER, "30", **self.variables)

    def run(self, pods: list[Any], *options: str, **files: Any) -> tuple[int, str, str]:
        """Exit code, output and errors of a job, which must have deleted all that it has created."""
        code, out, err = self.site.ends(self.launch(pods, *options, **files))
        assert (self.folder / "deleted").exists(), err
        deleted = {Path(one.partition("=")[2]).name for one in self.called("delete")[0][4:]}
        created = {path.name for path in (self.folder / "created").iterdir()}
        assert deleted == created - {"log-volume.json"}
        return code, out, err

    def called(self, verb: str) -> list[list[str]]:
        """The calls of kubectl with this verb."""
        calls = map(json.loads, (self.folder / "calls").read_text().splitlines())
        return [words for words in calls if words[0] == verb]


@pytest.fixture
def replay(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster without a script; at the end no process of its job is left."""
    site = Site("kubernetes", tmp_path, None)
    try:
        yield Cluster(tmp_path, site)
    finally:
        site.close()


def test_a_job_from_its_start_to_its_end(replay: Cluster, tmp_path: Path) -> None:
    """It is created and watched; worker 0's log is the output, all logs are kept; then it is deleted."""
    code, out, err = replay.run([*STARTED, *DONE])
    assert code == 0, err
    assert "kubernetes · 2 servers · 2 workers · tcp with TLS" in err
    assert "servers   ready in" in err
    assert "finished  in" in err
    assert out == "this is ctr-worker-0-aaaaa\n"
    logs = {path.name: path.read_text() for path in tmp_path.glob("psfleet-logs/ctr/*log.*")}
    assert logs == {
        "serverlog.0": "this is ctr-server-0\n",
        "serverlog.1": "this is ctr-server-1\n",
        "workerlog.0": out,
        "workerlog.1": TRACEBACK,
    }
    secrets = json.loads((replay.folder / "created" / "secrets.json").read_text())["items"]
    assert {one["kind"] for one in secrets} == {"Secret"}


@pytest.mark.parametrize(
    ("fault", "code", "sentences"),
    [
        (
            [update("server-1", ended(137, "OOMKilled"))],
            137,
            [
                "server 1 failed first: the memory of its container has run out (OOMKilled)",
                "host node-1 · rank 1",
            ],
        ),
        (
            [update("server-1", ended(137), **evicted(LOW))],
            137,
            [f"server 1 failed first: it was taken off its node: Evicted: {LOW}", "host node-1"],
        ),
        (
            [update("worker-1", ended(1), phase="Failed")],
            1,
            [
                "worker 1 failed first: ValueError: no such column 'cost'",
                "trainer.py:7 in <module>",
                "host node-1 · rank 1 · exit 1",
                "then stopped: worker 0 (asked to stop, clean)",
            ],
        ),
    ],
    ids=["memory", "evicted", "exit-1"],
)
def test_the_first_cause(
    fault: list[Any], code: int, sentences: list[str], replay: Cluster
) -> None:
    """A fault ends the job with its exit code; the report names role, rank, node and cause."""
    found, _, err = replay.run([*STARTED, *fault])
    assert found == code, err
    for sentence in sentences:
        assert sentence in err


def test_an_image_that_cannot_be_pulled(replay: Cluster) -> None:
    """The job does not wait for it."""
    back_off = waiting("ImagePullBackOff", MISSING_IMAGE)
    pulls = waiting("ContainerCreating", "")
    pods = [update("server-0", pulls, kind="ADDED"), update("server-0", back_off)]
    code, _, err = replay.run(pods)
    assert code == 1
    cause = f"its image cannot be pulled: ImagePullBackOff: {MISSING_IMAGE}"
    assert f"server 0 failed first: {cause}" in err
    assert "waits" not in err
    assert "host node-0 · rank 0" in err


def test_ctrl_c_while_a_pod_finds_no_node(replay: Cluster) -> None:
    """The launcher says what it waits for; SIGINT deletes the job and ends with 130."""
    pods = [*STARTED[:1], update("server-1", **unschedulable(NO_NODE))]
    launcher = replay.launch(pods)
    launcher.until_logged("serverlog.1", f"waits: Unschedulable: {NO_NODE}")
    launcher.process.send_signal(signal.SIGINT)
    code, _, err = replay.site.ends(launcher)
    assert code == 130, err
    assert f"server 1 on host node-1: waits: Unschedulable: {NO_NODE}" in err
    assert "stopped by SIGINT" in err
    assert (replay.folder / "deleted").exists()


def test_a_server_starts_again_in_its_pod(replay: Cluster) -> None:
    """With a log Kubernetes' restart counts as one of psfleet's, and the job goes on."""
    again = update("server-1", ready(), ended(137, "OOMKilled"))
    done = [*DONE[:3], update("server-1", ended(0), ended(137))]
    code, _, err = replay.run([*STARTED, again, *done], "--durability", "log")
    assert code == 0, err
    assert "server 1 ended with signal 9; it goes on from its log (restart 1 of 5)" in err


def test_workers_start_again(replay: Cluster) -> None:
    """A failed worker is replaced as often as asked; an eviction does not count."""
    pods = [
        *STARTED,
        update("worker-0", ended(137), **evicted(LOW)),
        update("worker-0", running(), kind="ADDED", uid="worker-0-b"),
        update("worker-1", ended(1), phase="Failed"),
        update("worker-1", running(), kind="ADDED", uid="worker-1-b"),
        *(update(f"worker-{rank}", ended(0), uid=f"worker-{rank}-b") for rank in (0, 1)),
        *DONE[2:],
    ]
    code, _, err = replay.run(pods, "--restart-workers", "1")
    assert code == 0, err
    said = f"it was taken off its node: Evicted: {LOW}; Kubernetes starts it again"
    assert f"worker 0 on host node-0: {said}" in err
    assert "worker 1 ended with exit code 1; a new process takes its seat (restart 1 of 1)" in err


def test_wrong_usage_is_not_tried_again(replay: Cluster) -> None:
    """Exit code 2 ends the job, as the Job's own rule does, although workers may be restarted."""
    pods = [*STARTED, update("worker-1", ended(2), phase="Failed")]
    code, _, err = replay.run(pods, "--restart-workers", "3")
    assert code == 2, err
    assert "worker 1 failed first" in err


def test_kubectl_loses_its_connection(replay: Cluster) -> None:
    """The watch is started again; what has happened already is not taken for news."""
    lost = {"fails": "Unable to connect to the server: dial tcp: connection refused"}
    code, out, err = replay.run([*STARTED, *DONE[:1], lost, *DONE[1:]])
    assert code == 0, err
    assert f"kubectl: {lost['fails']}; trying again" in err
    assert out == "this is ctr-worker-0-aaaaa\n"
    assert len([words for words in replay.called("get") if words[1] == "pods"]) == 2


def test_events_whose_cause_no_pod_shows(replay: Cluster) -> None:
    """They are said, those of the job alone."""
    quota = {"reason": "FailedCreate", "message": "pods are forbidden: exceeded quota"}
    events = [
        {"involvedObject": {"kind": "StatefulSet", "name": name}, "type": "Warning", **quota}
        for name in ("ctr-server", "other-server")
    ]
    code, _, err = replay.run([*STARTED, *DONE], events=events)
    assert code == 0, err
    said = re.findall(r"StatefulSet (\S+): FailedCreate: (.*)", err)
    assert said == [("ctr-server", quota["message"])]


def test_a_jobset(replay: Cluster) -> None:
    """It is created and watched in the same way; the volume of the logs stays."""
    pods = json.loads(json.dumps([*STARTED, *DONE]).replace("apps.kubernetes.io/pod-index", INDEX))
    code, _, err = replay.run(pods, "--jobset", "--durability", "log")
    assert code == 0, err
    created = {path.name for path in (replay.folder / "created").iterdir()}
    assert {"jobset.json", "log-volume.json"} < created


def test_what_the_cluster_refuses(replay: Cluster) -> None:
    """kubectl's own sentence is the error; what was created before it is deleted."""
    refusal = 'Error from server (Forbidden): secrets is forbidden: User "me" cannot create it'
    (replay.folder / "refusal").write_text(refusal)
    code, _, err = replay.site.ends(replay.launch([]))
    assert code == 2
    assert f"psfleet-launch: kubectl create: {refusal}" in err
    assert (replay.folder / "deleted").exists()


def test_a_deletion_that_fails(replay: Cluster) -> None:
    """The job's exit code stays, and the user is told how to see to it."""
    (replay.folder / "undeletable").write_text("Unable to connect to the server: EOF")
    code, _, err = replay.run([*STARTED, *DONE])
    assert code == 0, err
    assert "may still be in the cluster (Unable to connect to the server: EOF); delete it: " in err
    assert "kubectl delete statefulsets,jobs,persistentvolumeclaims,services," in err


def test_a_job_that_is_in_the_cluster_already(replay: Cluster) -> None:
    """It is named and left alone."""
    left = ["statefulset.apps/ctr-server"]
    code, _, err = replay.site.ends(replay.launch([], existing=left))
    assert code == 2
    assert "job 'ctr' is in the cluster already: statefulset.apps/ctr-server; choose" in err
    assert not replay.called("create") + replay.called("delete")


def test_without_kubectl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One sentence says what is missing."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert main([*JOB, TRAINER, "30"]) == 2
    assert "--engine kubernetes needs kubectl, which is not on the path" in capsys.readouterr().err


def test_a_dry_run_shows_what_would_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It asks no replay."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["--dry-run", *JOB, TRAINER, "30"]) == 0
    assert capsys.readouterr().out == "kubernetes: server 0, worker 0\n"
