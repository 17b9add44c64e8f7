"""The files that are rendered for Kubernetes: strictly valid, without secrets, and of a job that trains."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from psfleet_launch.commands.launch_command import main
from psfleet_launch.commands.options import load_job_file
from psfleet_launch.engines.launch_engine import EngineSettings
from psfleet_launch.job import job_folder
from psfleet_launch.job.job_request import JobRequest, Launch
from tests.agents.conftest import JOINED, PSFLEET, TRAINER, Site
from tests.agents.machines import NETWORK, Lab
from tests.agents.test_pages import job_file
from tests.agents.test_scaling import DIGESTS
from tests.agents.test_scaling import SCRIPT as SCALING
from tests.launch.conftest import ROOT, _environment, digest

VERSION = "1.33"
IMAGE = ("--image", "registry.example/psfleet:1", "--agents", "3", "--job", "ctr")
KEPT = ("--durability", "log", "--snapshot-every", "2s", "--replicas", "1", "--storage-class", "x")
OPTIONS: list[tuple[str, ...]] = [
    (),
    (*KEPT, "--watch", "0.0.0.0:9100"),
    ("--chaos", "7", "--server-memory", "1G", "--worker-cores", "2"),
]
SECRETS = "secrets.json"


def render(folder: Path, *options: str, script: tuple[str, ...] = (TRAINER, "30")) -> Any:
    """The files of a job of two servers and a worker, by name."""
    command = ["--render", "kubernetes", str(folder), *IMAGE, "--servers", "2", *options]
    assert main([*command, *script]) == 0
    return {path.name: json.loads(path.read_text()) for path in folder.iterdir()}


def jobs(files: dict[str, Any]) -> dict[str, Any]:
    """The specification of the Job of each role."""
    if jobset := files.get("jobset.json"):
        return {one["name"]: one["template"]["spec"] for one in jobset["spec"]["replicatedJobs"]}
    return {role: files[name]["spec"] for role, name in JOBS.items()}


JOBS = {"launcher": "launcher.json", "agent": "agents.json"}


def container(files: dict[str, Any], role: str) -> Any:
    """The container of a role's pods."""
    (container_spec,) = jobs(files)[role]["template"]["spec"]["containers"]
    return container_spec


@pytest.mark.parametrize("options", OPTIONS)
def test_files_are_strictly_valid(options: tuple[str, ...], tmp_path: Path) -> None:
    """Kubernetes' own schemas take every object and know every field; a misspelt one is refused."""
    validator = pytest.importorskip("kubernetes_validate", reason="no kubernetes-validate")
    files = render(tmp_path, *options)
    objects = [one for made in files.values() for one in made.get("items", [made])]
    claim = ["PersistentVolumeClaim"] * ("log-volume.json" in files)
    budgets = ["PodDisruptionBudget"] * 2
    assert sorted(one["kind"] for one in objects) == [
        *("ConfigMap", "Job", "Job", "NetworkPolicy", *claim, *budgets),
        *("Secret", "Secret", "Service"),
    ]
    for one in objects:
        validator.validate(one, VERSION, strict=True)
    agents = files["agents.json"]
    agents["spec"]["completionMod"] = agents["spec"].pop("completionMode")
    with pytest.raises(validator.ValidationError, match="completionMod"):
        validator.validate(agents, VERSION, strict=True)


@pytest.mark.parametrize("options", OPTIONS)
def test_a_jobset_is_strictly_valid(options: tuple[str, ...], tmp_path: Path) -> None:
    """The models that are generated from JobSet's API know every field; its Jobs are those of Kubernetes."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="no kubeflow-trainer-api")
    validator = pytest.importorskip("kubernetes_validate", reason="no kubernetes-validate")
    files = render(tmp_path, "--jobset", *options)
    jobset = files["jobset.json"]
    assert models.JobsetV1alpha2JobSet.from_dict(jobset).to_dict() == jobset
    for one in jobset["spec"]["replicatedJobs"]:
        job = one["template"] | {"apiVersion": "batch/v1", "kind": "Job"}
        validator.validate(job, VERSION, strict=True)
    misspelt = json.loads(json.dumps(jobset).replace("successPolicy", "sucessPolicy"))
    assert models.JobsetV1alpha2JobSet.from_dict(misspelt).to_dict() != misspelt


def test_other_options_leave_no_file_behind(tmp_path: Path) -> None:
    """A JobSet takes the place of the Jobs, which `kubectl apply -f FOLDER` would start too."""
    first = render(tmp_path, *KEPT)
    second = render(tmp_path, "--jobset")
    assert first.keys() - second.keys() == {"agents.json", "launcher.json", "log-volume.json"}
    assert second.keys() - first.keys() == {"jobset.json"}


def test_secrets_are_in_one_file(tmp_path: Path) -> None:
    """It is for its owner only; no key and no token is anywhere else."""
    files = render(tmp_path)
    assert (tmp_path / SECRETS).stat().st_mode & 0o777 == 0o600
    secrets = files.pop(SECRETS)["items"]
    assert [one["metadata"]["name"] for one in secrets] == ["ctr-launcher", "ctr-agent"]
    rest = json.dumps(files)
    for one in secrets:
        for name in ("token", "key.pem"):
            assert one["stringData"][name].split("\n")[0] not in rest
            assert one["stringData"][name]
    again = render(tmp_path)
    assert again[SECRETS]["items"][0]["stringData"] != secrets[0]["stringData"]


@pytest.mark.parametrize("form", [(), ("--jobset",)])
def test_names_of_objects_agree(form: tuple[str, ...], tmp_path: Path) -> None:
    """What selects pods selects those of its role; every volume is that of an object, and mounted once."""
    files = render(tmp_path, *form, *KEPT, "--watch", "0.0.0.0:9100")
    labels = {role: job["template"]["metadata"]["labels"] for role, job in jobs(files).items()}
    service = files["service.json"]
    assert service["spec"]["selector"] == labels["launcher"]
    budgets = files["disruption-budgets.json"]["items"]
    chosen = [one["spec"]["selector"]["matchLabels"] for one in budgets]
    assert chosen == [labels["launcher"], labels["agent"]]
    policy = files["network-policy.json"]["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= labels["agent"].items()
    assert policy["ingress"][1:] == [{"ports": [{"port": 9100}]}]
    command = container(files, "agent")["command"]
    port = service["spec"]["ports"][0]["port"]
    assert f"{service['metadata']['name']}:{port}" in command
    assert f'network.listen = "0.0.0.0:{port}"' in files["config.json"]["data"]["job.toml"]
    for role, job in jobs(files).items():
        volumes = job["template"]["spec"]["volumes"]
        mounts = container(files, role)["volumeMounts"]
        assert [one["name"] for one in mounts] == [one["name"] for one in volumes]
        named = {one["name"]: one for one in volumes}
        assert named["tls"]["secret"]["secretName"] == f"ctr-{role}"
        claim = files["log-volume.json"]["metadata"]["name"]
        assert named["logs"]["persistentVolumeClaim"] == {"claimName": claim}


def test_resources_are_those_of_the_fullest_agent(tmp_path: Path) -> None:
    """Requests for its processes, with room for each server's calls; nothing of what nobody names."""
    needs = ("--server-cores", "2", "--worker-cores", "4", "--server-memory", "1G")
    files = render(tmp_path / "named", *needs, "--agents", "2")
    size = {"cpu": "6", "memory": str((5 << 28) + (512 << 20))}
    assert container(files, "agent")["resources"] == {"requests": size}
    assert "resources" not in container(render(tmp_path / "none"), "agent")


def test_the_launcher_gets_the_whole_job(tmp_path: Path) -> None:
    """Its job file says what flags, job file and strategy say here, whatever the texts hold."""
    arguments = (TRAINER, "30", 'a "quoted" \\ text\n', "größe 😀", "--flag")
    config = tmp_path / "job.toml"
    config.write_text('[servers]\nmemory = "3G"\n[strategy.gradient_merge]\nk_steps = 4\n')
    words = ["--config", str(config), "--mode", "ssp", "--no-progress", "--start-timeout", "10min"]
    words += ["--log-level", "warning,psfleet.server=debug"]
    content = render(tmp_path / "files", *words, *KEPT, script=arguments)["config.json"]["data"]
    rendered = tmp_path / "rendered.toml"
    rendered.write_text(content["job.toml"])
    values, strategy = load_job_file(str(rendered), JobRequest, Launch, EngineSettings)
    assert strategy == {"gradient_merge": {"k_steps": 4}, "consistency": {"mode": "ssp"}}
    expected = {"script": TRAINER, "arguments": arguments[1:], "servers": 2, "memory": 3 << 30}
    expected |= {"durability": "log", "snapshot_every": "2s", "replicas": 1, "port": 0, "agents": 3}
    expected |= {"engine": "join", "name": "ctr", "log_dir": Path("/logs"), "progress": False}
    expected |= {"listen": "0.0.0.0:7163", "credentials": "/tls", "start_timeout": 600.0}
    assert values == expected | {"log_levels": "warning,psfleet.server=debug"}


class Pods:
    """The processes that containers of rendered files run; names and paths are replaced."""

    def __init__(self, site: Site, machines: Lab, files: dict[str, Any]) -> None:
        self._site = site
        self._machines = machines
        self._files = files
        site.lab = machines
        for secret in files[SECRETS]["items"]:
            place = site.folder / secret["metadata"]["name"]
            place.mkdir(0o700)
            for name, content in secret["stringData"].items():
                (place / name).touch(0o600)
                (place / name).write_text(content)

    def local(self, text: str, role: str) -> str:
        """A text with the names and paths of this machine."""
        places = {"/tls": f"ctr-{role}", "/logs": "psfleet-logs", "/job/job.toml": "job.toml"}
        for place, name in places.items():
            text = re.sub(rf'^{place}$|(?<="){place}(?=")', str(self._site.folder / name), text)
        return text.replace("ctr-launcher:", f"{NETWORK}.1:")

    def command(self, role: str) -> tuple[list[str], dict[str, str]]:
        """The command of a role without its program, and its variables but for the cache of kernels."""
        words = container(self._files, role)
        variables = {one["name"]: self.local(one["value"], role) for one in words["env"]}
        del variables["PSFLEET_CACHE"]
        return [self.local(word, role) for word in words["command"][1:]], variables

    def start_agent(self, number: int) -> None:
        """Start the agent's pod of this number on its machine."""
        command, variables = self.command("agent")
        name = ("--name", self._machines.hosts[number])
        self._site.agents.append(
            subprocess.Popen(
                [*self._machines.within(number + 1), *PSFLEET, *command, *name],
                cwd=self._site.folder,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=_environment() | variables,
            )
        )

    def start_launcher(self) -> Any:
        """Start the launcher's pod."""
        content = self._files["config.json"]["data"]["job.toml"]
        (self._site.folder / "job.toml").write_text(self.local(content, "launcher"))
        command, variables = self.command("launcher")
        return self._site.start(*command, **variables)


@JOINED
def test_the_pods_of_a_job_train(site: Site, machines: Lab) -> None:
    """Agents that come before the launcher wait for it. The job gets a third server, as its script asks; a
    machine loses its power, and the standby of its server takes over. No bit differs from a job of one
    machine that keeps its two servers, and there are snapshots and a page to watch."""
    watched = ("--watch", "0.0.0.0:9100")
    script = (SCALING, "12", str(site.folder), "3")
    pods = Pods(site, machines, render(site.folder / "files", *KEPT, *watched, script=script))
    for number in range(3):
        pods.start_agent(number)
    launcher = pods.start_launcher()
    launcher.until(lambda: "servers   3 from now on" in site.said(), "three servers")
    for rank in (0, 1):
        launcher.until_logged(f"serverlog.{rank}.copy.2", f"standby 2 of server {rank} ready")
    logs = site.folder / "psfleet-logs" / "ctr"
    launcher.until(lambda: bool(job_folder.latest(logs)), "snapshot")
    machines.power_off("beta")
    try:
        launcher.until(lambda: "server 1 copy 2 takes over" in site.said(), "takeover")
        (site.folder / "go").touch()
        code, out, err = site.ends(launcher)
    finally:
        machines.cut("beta", is_up=True)
    assert code == 0, err
    assert "waits for 3 machine(s) at 0.0.0.0:7163" in err
    assert "watch     https://" in err
    assert "server 1 cannot be reached; server 1 copy 2 takes over" in err
    assert (site.folder / "servers.0").read_text() == "3"
    assert digest(out) == DIGESTS[1]
    assert [agent.wait(60) for agent in site.agents] == [0, -9, 0]


@pytest.mark.long
@JOINED
def test_chaos_in_pods(site: Site, machines: Lab) -> None:
    """Faults in a job of pods break no promise; in sync mode agents started again run it once more."""
    script = (str(ROOT / "tests" / "chaos" / "scripts" / "trainer.py"), "sync", "4")
    chaos = ("--chaos", "7", "--workers", "2", *KEPT[:2])
    pods = Pods(site, machines, render(site.folder / "files", *chaos, script=script))
    launcher = pods.start_launcher()
    for runs in (1, 2):
        launcher.until(lambda runs=runs: site.said().count("waits for 3") == runs, f"run {runs}")
        # Their orphans must not become children of this process, which adopts some while it starts others.
        assert not any(agent.wait(60) for agent in site.agents)
        for number in range(3):
            pods.start_agent(number)
    site.ends_with(0, launcher)
    report = json.loads((site.folder / "psfleet-logs" / "ctr" / "chaos.json").read_text())
    verdicts = {one["promise"]: one["verdict"] for one in report["promises"]}
    assert "kept" in verdicts.values(), report
    assert "BROKEN" not in verdicts.values(), report
    assert not [*site.folder.glob("psfleet-logs/psfleet-*")]


def test_the_job_file_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It renders as printed; with --dry-run nothing is written."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text(job_file("kubernetes"))
    (tmp_path / "train.py").touch()
    words = ["--render", "kubernetes", "files", "--config", "job.toml"]
    assert main(["--dry-run", *words]) == 0
    assert not (tmp_path / "files").exists()
    assert main(words) == 0
    first, second = (capsys.readouterr().out.splitlines(), sorted((tmp_path / "files").iterdir()))
    assert first == [f"files/{path.name}" for path in second] * 2


FILES = ("--render", "kubernetes", "x")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ((*FILES, "--image", ""), "needs an image with psfleet and the script (--image)"),
        ((*FILES, "--job", "My_job"), "--job is 'My_job'; Kubernetes takes up to 40 lower"),
        (
            ("--engine", "kubernetes"),
            "write them with --render kubernetes FOLDER, then run kubectl",
        ),
        ((*FILES, "--engine", "ssh"), "and --engine is 'ssh'; leave one of them out"),
        ((*FILES, "--replicas", "1", "--agents", "1"), "--replicas 1 needs two machines"),
        (("--render", "kubernetes", "/proc/none"), "'/proc/none', which cannot be written"),
        (("--render", "kubernetes", "s3://b/x"), "'s3://b/x' is a URL"),
    ],
)
def test_what_cannot_be_rendered(
    options: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One sentence says why."""
    assert main([*IMAGE, *options, TRAINER, "30"]) == 2
    assert re.search(re.escape(sentence), capsys.readouterr().err)
