"""Jobs on Kubernetes: files with a pod of the launcher and pods of agents, which the user applies.

The objects have no secrets: pods name the Secret that they mount. The launcher's pod runs `psfleet-launch
--engine join` with a job file from a ConfigMap, so everything that the engine can do is there.
"""

import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from typing_extensions import override

from psfleet.core.base.errors import ConfigError
from psfleet.core.base.settings.declaration import setting, settings_of
from psfleet.core.net.connections.credentials import FILES
from psfleet_launch.engines.join import JoinEngine, JoinSettings
from psfleet_launch.engines.remote.machine_placement import MachinePlacement
from psfleet_launch.job.job_plan import Job
from psfleet_launch.job.job_request import JobRequest, Launch

Manifest = dict[str, Any]

LAUNCHER, AGENT = "launcher", "agent"
OPTIONAL_FILES = ("agents.json", "jobset.json", "launcher.json", "log-volume.json")

_PORT = 7163  # where the launcher waits for agents
_WAIT = 600  # seconds that an agent waits for the launcher's pod
_USER = 1000  # the user of the image
_LOGS = "/logs"
_CONTEXT = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


_SECRETS = "secrets.json"
_FOLDERS = {LAUNCHER: "server", AGENT: "worker"}
"""Role whose credentials each pod has."""


def manifests(
    request: JobRequest, name: str, launch: Launch, chosen: "KubernetesSettings"
) -> dict[str, Manifest]:
    """Return the files of a job, by name.

    Raises:
        ConfigError: Kubernetes cannot run the job as it is asked for.
    """
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", name):
        raise ConfigError(
            f"--job is {name!r}; Kubernetes takes up to 40 lower case letters, digits and '-'"
        )
    if not chosen.image:
        raise ConfigError(
            "--render kubernetes needs an image with psfleet and the script (--image)"
        )
    objects = _JobObjects(request, name, launch, chosen)
    files = {
        "config.json": objects.config(),
        "disruption-budgets.json": objects.disruption_budgets(),
        "network-policy.json": objects.network_policy(),
        "service.json": objects.service(),
    }
    if objects.has_volume:
        files["log-volume.json"] = objects.volume_claim()
    if chosen.jobset:
        return files | {"jobset.json": objects.job_set()}
    return files | {"agents.json": objects.agents(), "launcher.json": objects.launcher()}


def job_file(items: Mapping[type, Any], strategy: Mapping[str, Any]) -> str:
    """Return a job file with what these groups of settings hold; defaults are left out."""
    lines = {
        one.key: value
        for group, item in items.items()
        for one in settings_of(group)
        if one.key and (value := getattr(item, one.name)) != one.default
    }
    lines |= {f"strategy.{part}": options for part, options in strategy.items()}
    return "".join(f"{key} = {_toml(value)}\n" for key, value in lines.items())


def _toml(value: Any) -> str:
    """Return a value as TOML, which has the texts, numbers and switches of JSON."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name} = {_toml(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(str(value) if isinstance(value, Path) else value, ensure_ascii=False)


@dataclass(frozen=True)
class _JobObjects:
    """The objects of one job."""

    request: JobRequest
    name: str
    launch: Launch
    chosen: "KubernetesSettings"

    @property
    def has_volume(self) -> bool:
        """Flag: all pods need one folder of logs."""
        keeps = self.request.keeps_log or self.request.keeps_snapshots
        return keeps or self.launch.chaos is not None

    # -- pods ------------------------------------------------------------------------------------

    def launcher(self) -> Manifest:
        """Return the Job whose one pod runs the launcher; its exit code is that of the training job."""
        command = ["psfleet-launch", "--config", "/job/job.toml"]
        template = self._pod(LAUNCHER, command, {"config": {"configMap": {"name": self.name}}})
        return self._job(LAUNCHER, {"backoffLimit": 0, "template": template})

    def agents(self) -> Manifest:
        """Return the Indexed Job of the agents: the loss of one ends no other one."""
        command = ["psfleet", "agent", "--join", f"{self.name}-{LAUNCHER}:{_PORT}"]
        command += ["--credentials", "/tls", "--wait", str(_WAIT)]
        spec = {
            "completions": self.chosen.agents,
            "parallelism": self.chosen.agents,
            "completionMode": "Indexed",
            "backoffLimitPerIndex": 0,
            "successPolicy": {"rules": [{"succeededCount": 1}]},  # it has seen the end of the job
            "template": self._pod(AGENT, command, {}),
        }
        return self._job(AGENT, spec)

    def job_set(self) -> Manifest:
        """Return both Jobs as one; the end of the launcher's is the end of both."""
        jobs = {LAUNCHER: self.launcher(), AGENT: self.agents()}
        return {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": self._metadata(),
            "spec": {
                "network": {"enableDNSHostnames": False},
                "successPolicy": {"operator": "All", "targetReplicatedJobs": [LAUNCHER]},
                "replicatedJobs": [
                    {"name": role, "replicas": 1, "template": {"spec": job["spec"]}}
                    for role, job in jobs.items()
                ],
            },
        }

    def _pod(self, role: str, command: list[str], volumes: Manifest) -> Manifest:
        logs: Manifest = {"emptyDir": {}}
        if self.has_volume:
            logs = {"persistentVolumeClaim": {"claimName": f"{self.name}-logs"}}
        secret = {"secretName": f"{self.name}-{role}", "defaultMode": 0o400}
        volumes = {"tls": {"secret": secret}, "logs": logs, "cache": {"emptyDir": {}}} | volumes
        places = {"tls": "/tls", "logs": _LOGS, "cache": "/cache", "config": "/job"}
        variables = {"PSFLEET_CACHE": "/cache"}
        if role == LAUNCHER and self.launch.chaos is not None:
            variables["TMPDIR"] = _LOGS  # the notes of chaos are for all pods
        container = {
            "name": role,
            "image": self.chosen.image,
            "command": command,
            "env": [{"name": name, "value": value} for name, value in variables.items()],
            "volumeMounts": [{"name": name, "mountPath": places[name]} for name in volumes],
            "securityContext": _CONTEXT,
        }
        if role == AGENT and (needs := dict(self._needs())):
            container["resources"] = {"requests": needs}
        spec = {
            "restartPolicy": "Never",
            "shareProcessNamespace": True,  # orphans are reaped
            "enableServiceLinks": False,  # they would be variables called NAME_PORT
            "automountServiceAccountToken": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": _USER,
                "fsGroup": _USER,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "topologySpreadConstraints": [
                {
                    "maxSkew": 1,
                    "topologyKey": "kubernetes.io/hostname",
                    "whenUnsatisfiable": "ScheduleAnyway",
                    "labelSelector": {"matchLabels": self._labels(role)},
                }
            ],
            "containers": [container],
            "volumes": [{"name": name} | volume for name, volume in volumes.items()],
        }
        return {"metadata": {"labels": self._labels(role)}, "spec": spec}

    def _needs(self) -> Iterator[tuple[str, str]]:
        """Yield the requests of the fullest agent. It has no limits: it may take over from a lost one."""
        job = Job(self.request, self.name, "", Path(), Path(_LOGS))
        machines = [f"{AGENT} {number}" for number in range(self.chosen.agents)]
        needs = MachinePlacement(job, machines).largest.with_headroom
        if needs.cores:
            yield "cpu", str(needs.cores)
        if needs.memory:
            yield "memory", str(needs.memory)

    def _job(self, role: str, spec: Manifest) -> Manifest:
        return {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": self._metadata(role),
            "spec": spec,
        }

    # -- the rest --------------------------------------------------------------------------------

    def config(self) -> Manifest:
        """Return the ConfigMap with the launcher's job file."""
        place = {"engine": "join", "name": self.name, "log_dir": Path(_LOGS)}
        launch = Launch(**vars(self.launch) | place | {"listen": f"0.0.0.0:{_PORT}"})
        join = self.chosen.in_cluster("/tls")
        items = {JobRequest: self.request, Launch: launch, type(join): join}
        content = {"job.toml": job_file(items, self.request.strategy)}
        metadata = self._metadata()
        return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": content}

    def service(self) -> Manifest:
        """Return the headless Service by whose name agents find the launcher."""
        spec = {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": self._labels(LAUNCHER),
            "ports": [{"name": "agents", "port": _PORT}],
        }
        metadata = self._metadata(LAUNCHER)
        return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}

    def volume_claim(self) -> Manifest:
        """Return the claim for the volume of logs and snapshots."""
        spec: Manifest = {
            "accessModes": ["ReadWriteMany"],
            "resources": {"requests": {"storage": self.chosen.volume_size}},
        }
        if self.chosen.storage_class:
            spec["storageClassName"] = self.chosen.storage_class
        return {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": self._metadata("logs"),
            "spec": spec,
        }

    def disruption_budgets(self) -> Manifest:
        """Return budgets: the launcher's node is not drained, those of agents one at a time."""
        budgets = [
            {
                "apiVersion": "policy/v1",
                "kind": "PodDisruptionBudget",
                "metadata": self._metadata(role),
                "spec": {"minAvailable": count, "selector": {"matchLabels": self._labels(role)}},
            }
            for role, count in ((LAUNCHER, 1), (AGENT, self.chosen.agents - 1))
        ]
        return {"apiVersion": "v1", "kind": "List", "items": budgets}

    def network_policy(self) -> Manifest:
        """Return the policy: only pods of the job reach each other, and others the port of `--watch`."""
        selector = {"podSelector": {"matchLabels": {"psfleet.job": self.name}}}
        ingress: list[Manifest] = [{"from": [selector]}]
        host, _, port = self.launch.watch.rpartition(":")
        if host and port.isdigit():
            ingress.append({"ports": [{"port": int(port)}]})
        return {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": self._metadata(),
            "spec": selector | {"policyTypes": ["Ingress"], "ingress": ingress},
        }

    def _labels(self, role: str) -> dict[str, str]:
        return {"psfleet.job": self.name, "psfleet.role": role}

    def _metadata(self, suffix: str = "") -> Manifest:
        name = f"{self.name}-{suffix}" if suffix else self.name
        return {"name": name, "labels": {"psfleet.job": self.name}}


@dataclass(frozen=True)
class KubernetesSettings(JoinSettings):
    """Settings of the files.

    Attributes:
        render: Folder of the files.
    """

    render: str = ""
    image: str = setting(
        "",
        "Render kubernetes: image with psfleet and the script",
        names="--image engine.kubernetes.image",
    )
    storage_class: str = setting(
        "",
        "Render kubernetes: storage class of the volume of logs; by default that of the cluster",
        names="--storage-class engine.kubernetes.storage_class",
        metavar="NAME",
    )
    volume_size: str = setting(
        "20Gi",
        "Render kubernetes: size of the volume of logs and snapshots",
        names="--volume-size engine.kubernetes.volume_size",
        metavar="SIZE",
    )
    jobset: bool = setting(
        False,
        "Render kubernetes: one JobSet in place of two Jobs",
        names="--jobset engine.kubernetes.jobset",
    )

    def in_cluster(self, credentials: str) -> JoinSettings:
        """Return the settings of the launcher in its pod, whose credentials are in this folder."""
        return JoinSettings(agents=self.agents, credentials=credentials)


class KubernetesEngine(JoinEngine):
    """Writes the files of a job; in the cluster it is one of engine join."""

    name = "kubernetes"
    settings = KubernetesSettings

    @override
    @classmethod
    def hand_over(
        cls, request: JobRequest, name: str, launch: Launch, words: Sequence[str]
    ) -> int | None:
        settings = launch.of(KubernetesSettings)
        if not settings.render:
            raise ConfigError(
                "a job on Kubernetes starts from files: write them with --render kubernetes FOLDER, then run "
                "kubectl apply -f FOLDER"
            )
        files = manifests(request, name, launch, settings)
        if not launch.dry_run:
            _write(Path(settings.render), {**files, _SECRETS: _secrets(name)})
        click.echo("\n".join(f"{settings.render}/{file}" for file in sorted([*files, _SECRETS])))
        return 0


ENGINE = KubernetesEngine


def _secrets(name: str) -> Manifest:
    """Return the Secrets of the launcher and of agents, with new credentials."""
    from psfleet.core.net.connections.certificates import make_credentials  # loads cryptography

    with tempfile.TemporaryDirectory(prefix="psfleet-") as parent:
        folders = make_credentials(Path(parent) / "tls")
        secrets = [
            {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": f"{name}-{role}", "labels": {"psfleet.job": name}},
                "type": "Opaque",
                "stringData": {file: (folders[folder] / file).read_text() for file in FILES},
            }
            for role, folder in _FOLDERS.items()
        ]
    return {"apiVersion": "v1", "kind": "List", "items": secrets}


def _write(folder: Path, files: Mapping[str, Manifest]) -> None:
    """Write JSON, which is YAML too; the secrets can be read by their owner only.

    Raises:
        ConfigError: The folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in OPTIONAL_FILES:  # of an earlier job, with other options
            (folder / name).unlink(missing_ok=True)
        for name, content in files.items():
            path = folder / name
            path.unlink(missing_ok=True)
            mode = 0o600 if name == _SECRETS else 0o644
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
                json.dump(content, file, indent=2)
                file.write("\n")
    except OSError as error:
        raise ConfigError(
            f"--render names {str(folder)!r}, which cannot be written ({error.strerror}); name another folder"
        ) from None
