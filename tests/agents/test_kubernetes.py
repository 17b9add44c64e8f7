"""The files that are rendered for Kubernetes: strictly valid, without secrets, and of a job that trains."""

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from psfleet_launch.commands.launch_command import main
from tests.agents.conftest import TRAINER
from tests.agents.test_engines import DIGEST
from tests.agents.test_pages import job_file
from tests.launch.conftest import _environment, digest
from tests.waiting import until

VERSION = "1.33"
IMAGE = ("--engine", "kubernetes", "--image", "registry.example/psfleet:1")
LOGGED = ("--durability", "log", "--server-memory", "1G", "--storage-class", "fast")
SECRETS = "secrets.json"


def render(folder: Path, *options: str) -> dict[str, Any]:
    """The files of a job of two servers and two workers, by name."""
    words = [*IMAGE, "--render", str(folder), "--servers", "2", "--workers", "2", "--job", "ctr"]
    assert main([*words, *options, TRAINER, "30"]) == 0
    return {path.name: json.loads(path.read_text()) for path in folder.iterdir()}


def containers(files: dict[str, Any]) -> dict[str, Any]:
    """The container of each role."""
    templates = (files[f"{role}s.json"]["spec"]["template"] for role in ("server", "worker"))
    return {one["name"]: one for made in templates for one in made["spec"]["containers"]}


@pytest.mark.parametrize("options", [(), LOGGED, ("--sync", "--restart-workers", "3")])
def test_files_are_strictly_valid(options: tuple[str, ...], tmp_path: Path) -> None:
    """Kubernetes' own schemas take every object and know every field; a misspelt one is refused."""
    validator = pytest.importorskip("kubernetes_validate", reason="no kubernetes-validate")
    files = render(tmp_path, *options)
    objects = [one for made in files.values() for one in made.get("items", [made])]
    kinds = [one["kind"] for one in objects]
    assert sorted(kinds) == [
        *("Job", "NetworkPolicy", "PodDisruptionBudget"),
        *("Secret", "Secret", "Service", "StatefulSet"),
    ]
    for one in objects:
        validator.validate(one, VERSION, strict=True)
    workers = files["workers.json"]
    workers["spec"]["completionMod"] = workers["spec"].pop("completionMode")
    with pytest.raises(validator.ValidationError, match="completionMod"):
        validator.validate(workers, VERSION, strict=True)


JOBSETS = [("--jobset",), ("--jobset", *LOGGED), ("--jobset", "--sync", "--restart-workers", "3")]


@pytest.mark.parametrize("options", JOBSETS)
def test_a_jobset_is_strictly_valid(options: tuple[str, ...], tmp_path: Path) -> None:
    """The models that are generated from JobSet's API know every field; its Jobs are those of Kubernetes."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="no kubeflow-trainer-api")
    validator = pytest.importorskip("kubernetes_validate", reason="no kubernetes-validate")
    files = render(tmp_path, *options)
    made = files.pop("jobset.json")
    assert models.JobsetV1alpha2JobSet.from_dict(made).to_dict() == made
    replicated = made["spec"]["replicatedJobs"]
    jobs = [one["template"] | {"apiVersion": "batch/v1", "kind": "Job"} for one in replicated]
    rest = [one for file in files.values() for one in file.get("items", [file])]
    for one in jobs + rest:
        validator.validate(one, VERSION, strict=True)
    kinds = sorted(one["kind"] for one in rest)
    claim = ["PersistentVolumeClaim"] * ("--durability" in options)
    assert kinds == ["NetworkPolicy", *claim, "PodDisruptionBudget", "Secret", "Secret"]
    misspelt = json.loads(json.dumps(made).replace("dependsOn", "dependOn"))
    assert models.JobsetV1alpha2JobSet.from_dict(misspelt).to_dict() != misspelt


@pytest.mark.parametrize("options", JOBSETS)
def test_a_jobset_is_one_by_its_definition(options: tuple[str, ...], tmp_path: Path) -> None:
    """The CustomResourceDefinition of a cluster takes it, without a field that it would drop.

    PSFLEET_TEST_JOBSET_CRD names its file: kubectl get crd jobsets.jobset.x-k8s.io --output json.
    """
    definition = os.environ.get("PSFLEET_TEST_JOBSET_CRD")
    if not definition:
        pytest.skip("PSFLEET_TEST_JOBSET_CRD names no definition of JobSet")
    jsonschema = pytest.importorskip("jsonschema", reason="no jsonschema")
    yaml = pytest.importorskip("yaml", reason="no PyYAML")
    made = render(tmp_path, *options)["jobset.json"]
    (version,) = yaml.safe_load(Path(definition).read_text())["spec"]["versions"]
    assert made["apiVersion"] == f"jobset.x-k8s.io/{version['name']}"
    schema = strict(version["schema"]["openAPIV3Schema"])
    jsonschema.validate(made, schema)
    made["spec"]["successPolicy"]["operator"] = "Some"
    with pytest.raises(jsonschema.ValidationError, match="'Some' is not one of"):
        jsonschema.validate(made, schema)


def strict(schema: Any) -> Any:
    """A schema that refuses unknown fields, which Kubernetes would drop."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: strict(one) for name, one in schema.items()}
    is_object = isinstance(schema.get("properties"), dict) and schema.get("type") == "object"
    return made | ({"additionalProperties": False} if is_object else {})


def test_roles_get_what_they_are_promised(tmp_path: Path) -> None:
    """Requests and limits of both roles, and as many threads as cores; nothing of what nobody names."""
    needs = ("--server-cores", "2", "--worker-cores", "4", "--worker-memory", "3G")
    made = containers(render(tmp_path / "asked", *needs, "--server-memory", "1G"))
    for role, cpu, memory in (("server", "2", (5 << 28) + (512 << 20)), ("worker", "4", 3 << 30)):
        size = {"cpu": cpu, "memory": str(memory)}
        assert made[role]["resources"] == {"requests": size, "limits": size}
        told = {one["name"]: one.get("value") for one in made[role]["env"]}
        assert (told["OMP_NUM_THREADS"], told["NUMBA_NUM_THREADS"]) == (cpu, cpu)
    assert not any("resources" in one for one in containers(render(tmp_path / "none")).values())


def test_a_jobset_finds_its_servers(tmp_path: Path) -> None:
    """Names of servers are those that JobSet gives to pods; both roles get their rank from their Job."""
    files = render(tmp_path, "--jobset", "--restart-servers", "7", *LOGGED)
    spec = files["jobset.json"]["spec"]
    servers, workers = (one["template"]["spec"] for one in spec["replicatedJobs"])
    for role, job in (("server", servers), ("worker", workers)):
        pod = job["template"]
        assert pod["metadata"]["labels"]["psfleet.role"] == role
        told = {one["name"]: one for one in pod["spec"]["containers"][0]["env"]}
        hosts = [f"ctr-server-0-{rank}.{spec['network']['subdomain']}:9000" for rank in (0, 1)]
        assert told["PSFLEET_SERVERS"]["value"] == ",".join(hosts)
        path = told["PSFLEET_RANK"]["valueFrom"]["fieldRef"]["fieldPath"]
        assert path == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert (servers["backoffLimitPerIndex"], workers["backoffLimitPerIndex"]) == (7, 0)
    (log,) = [one for one in servers["template"]["spec"]["volumes"] if one["name"] == "log"]
    claim = json.loads((tmp_path / "log-volume.json").read_text())
    assert log["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


def test_secrets_are_in_one_file(tmp_path: Path) -> None:
    """It is for its owner only; no key and no token is anywhere else."""
    files = render(tmp_path)
    assert (tmp_path / SECRETS).stat().st_mode & 0o777 == 0o600
    secrets = files.pop(SECRETS)["items"]
    assert [one["metadata"]["name"] for one in secrets] == ["ctr-server-tls", "ctr-worker-tls"]
    rest = json.dumps(files)
    for one in secrets:
        for name in ("token", "key.pem"):
            assert one["stringData"][name].split("\n")[0] not in rest
            assert one["stringData"][name]
    again = render(tmp_path)
    assert again[SECRETS]["items"][0]["stringData"] != secrets[0]["stringData"]


def test_selectors_meet(tmp_path: Path) -> None:
    """The Service, the budget and the policy select the pods; names of servers are those of the pods."""
    files = render(tmp_path, *LOGGED)
    labels = {
        role: files[f"{role}s.json"]["spec"]["template"]["metadata"]["labels"]
        for role in ("server", "worker")
    }
    servers = files["servers.json"]
    assert servers["spec"]["selector"]["matchLabels"] == labels["server"]
    assert files["service.json"]["spec"]["selector"] == labels["server"]
    budget, policy = files["disruption-budget.json"]["spec"], files["network-policy.json"]["spec"]
    assert budget["selector"]["matchLabels"] == labels["server"]
    assert policy["podSelector"]["matchLabels"].items() <= labels["worker"].items()
    service, pods = files["service.json"]["metadata"]["name"], servers["metadata"]["name"]
    assert servers["spec"]["serviceName"] == service
    told = {one["name"]: one.get("value") for one in containers(files)["worker"]["env"]}
    assert told["PSFLEET_SERVERS"] == f"{pods}-0.{service}:9000,{pods}-1.{service}:9000"
    mounts = {one["name"] for one in containers(files)["server"]["volumeMounts"]}
    claims = {one["metadata"]["name"] for one in servers["spec"]["volumeClaimTemplates"]}
    volumes = {one["name"] for one in servers["spec"]["template"]["spec"]["volumes"]}
    assert mounts == claims | volumes


def test_the_pods_of_a_job_train(tmp_path: Path) -> None:
    """The containers' commands and variables, run as processes here, give the bits of a launched job."""
    files = render(tmp_path / "files")
    for secret in files[SECRETS]["items"]:
        place = tmp_path / secret["metadata"]["name"]
        place.mkdir(0o700)
        for name, content in secret["stringData"].items():
            (place / name).touch(0o600)
            (place / name).write_text(content)
    with contextlib.ExitStack() as stack:
        ready: list[str] = []
        for rank in (0, 1):
            servers = ",".join([*ready, *["127.0.0.1:0"] * (2 - len(ready))])
            file = tmp_path / f"ready.{rank}"
            told = {"PSFLEET_SERVERS": servers, "PSFLEET_READY_FILE": str(file)}
            told["PSFLEET_LISTEN"] = "127.0.0.1:0"
            server = start(tmp_path, files, "server", rank, told)
            stack.callback(end, server)
            until(lambda file=file, one=server: file.exists() or one.poll() is not None)  # type: ignore[misc]
            assert server.poll() is None, (tmp_path / f"server.{rank}").read_text()
            ready.append(json.loads(file.read_text())["endpoint"])
        told = {"PSFLEET_SERVERS": ",".join(ready)}
        workers = [start(tmp_path, files, "worker", rank, told) for rank in (0, 1)]
        for worker in workers:
            stack.callback(end, worker)
        assert [worker.wait(120) for worker in workers] == [0, 0], tmp_path
    assert digest((tmp_path / "worker.0").read_text()) == DIGEST


def start(
    folder: Path, files: dict[str, Any], role: str, rank: int, told: dict[str, str]
) -> "subprocess.Popen[bytes]":
    """Start what a container runs; `told`: what names and paths are here."""
    container = containers(files)[role]
    variables = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    assert {one["name"] for one in container["env"]} - variables.keys() <= {
        "PSFLEET_RANK",
        "POD_IP",
    }
    variables |= {"PSFLEET_RANK": str(rank), "PSFLEET_TLS": str(folder / f"ctr-{role}-tls")} | told
    del variables["PSFLEET_CACHE"]  # so that this machine's kernels are used
    words = {"psfleet-server": ["-m", "psfleet_server"], "python": []}
    program, *arguments = container["command"]
    with (folder / f"{role}.{rank}").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, *words[program], *arguments],
            stdout=log,
            stderr=log,
            cwd=folder,
            env=_environment() | variables,
        )


def end(process: "subprocess.Popen[bytes]") -> None:
    """Leave no process."""
    if process.poll() is None:
        process.terminate()
    process.wait()


def test_the_job_file_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It renders as printed; with --dry-run nothing is written."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text(job_file("kubernetes"))
    (tmp_path / "train.py").touch()
    words = ["--render", "files", "--config", "job.toml"]
    assert main(["--dry-run", *words]) == 0
    assert not (tmp_path / "files").exists()
    assert main(words) == 0
    first, second = (capsys.readouterr().out.splitlines(), sorted((tmp_path / "files").iterdir()))
    assert first == [f"files/{path.name}" for path in second] * 2


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--render", "x", "--image", ""), "needs an image with psfleet and the script (--image)"),
        (
            ("--render", "x", "--job", "My_job"),
            "--job is 'My_job'; Kubernetes takes up to 40 lower",
        ),
        (("--render", "x", "--snapshot-every", "5min"), "snapshots need a folder that all servers"),
        (("--render", "x", "--replicas", "1"), "--replicas does not go with --engine kubernetes"),
        (("--watch", "0"), "--watch 0 does not go with --engine kubernetes, whose launcher cannot"),
        (
            ("--watch", "9100"),
            "run the launcher in a pod with --engine join and --watch 0.0.0.0:9100",
        ),
        (("--render", "/proc/none"), "--render is '/proc/none', which cannot be written"),
    ],
)
def test_what_cannot_be_rendered(
    options: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One sentence says why."""
    assert main([*IMAGE, "--job", "ctr", *options, TRAINER, "30"]) == 2
    assert re.search(re.escape(sentence), capsys.readouterr().err)
