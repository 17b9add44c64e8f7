"""Engine `kubernetes`: writes the manifests of a job (`--render kubernetes FOLDER`), and does not start the
job.

The manifests are made from the templates in `manifests/` and the settings of the job. They describe a pod
for the launcher and pods for agents. The launcher's pod runs `psfleet-launch --engine join` with a job file
from a ConfigMap, so everything that works with engine join works there. Only `secrets.json` contains
secrets; pods mount them by name.
"""

import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from string import Template
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

OPTIONAL_FILES = ("agents.json", "jobset.json", "launcher.json", "log-volume.json")

_LAUNCHER, _AGENT = "launcher", "agent"
_PORT = 7163  # port of the launcher for agents
_WAIT = 600  # seconds that an agent waits for the launcher's pod
_LOGS = "/logs"
_SECRETS = "secrets.json"
_CREDENTIALS = {_LAUNCHER: "server", _AGENT: "worker"}
"""Role of the credentials of each pod. For TLS the launcher is the server, and agents are its clients."""


def manifests(
    request: JobRequest, name: str, launch: Launch, chosen: "KubernetesSettings"
) -> dict[str, Manifest]:
    """Return the manifests of a job, by file name.

    Args:
        name: Name of the job, which becomes part of the names of all objects.

    Raises:
        ConfigError: Kubernetes cannot run a job with these settings.
    """
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", name):
        raise ConfigError(
            f"--job is {name!r}; Kubernetes takes up to 40 lower case letters, digits and '-'"
        )
    if not chosen.image:
        raise ConfigError(
            "--render kubernetes needs an image with psfleet and the script (--image)"
        )
    fill = partial(_filled, name=name)
    has_volume = request.keeps_log or request.keeps_snapshots or launch.chaos is not None
    # In pod.json, processes share a namespace so that orphans are reaped. Service links are off, because
    # they would set variables of the form NAME_PORT.
    pod = partial(
        fill,
        "pod.json",
        image=chosen.image,
        claim={"claimName": f"{name}-logs"} if has_volume else None,
        scratch=None if has_volume else {},
    )
    launcher_pod = pod(
        role=_LAUNCHER,
        command=["psfleet-launch", "--config", "/job/job.toml"],
        # With --chaos all pods must share the temporary folder, which has the audit files. Use the volume
        # of the logs for it.
        notes_of_chaos=None if launch.chaos is None else {"name": "TMPDIR", "value": _LOGS},
        config_mount={"name": "config", "mountPath": "/job"},
        config_volume={"name": "config", "configMap": {"name": name}},
        resources=None,
    )
    agent_pod = pod(
        role=_AGENT,
        command=[
            *("psfleet", "agent", "--join", f"{name}-{_LAUNCHER}:{_PORT}"),
            *("--credentials", "/tls", "--wait", str(_WAIT)),
        ],
        notes_of_chaos=None,
        config_mount=None,
        config_volume=None,
        resources=_resources(request, name, chosen.agents),
    )
    jobs = {
        "launcher.json": fill("launcher.json", pod=launcher_pod),
        "agents.json": fill("agents.json", pod=agent_pod, agents=chosen.agents),
    }
    if chosen.jobset:
        launcher, agent = jobs["launcher.json"]["spec"], jobs["agents.json"]["spec"]
        jobs = {"jobset.json": fill("jobset.json", launcher=launcher, agent=agent)}
    if has_volume:
        jobs["log-volume.json"] = fill(
            "log-volume.json",
            volume_size=chosen.volume_size,
            storage_class=chosen.storage_class or None,
        )
    return jobs | {
        "config.json": fill(
            "config.json", job_file=_launcher_job_file(request, name, launch, chosen)
        ),
        "disruption-budgets.json": fill(
            "disruption-budgets.json", all_agents_but_one=chosen.agents - 1
        ),
        "network-policy.json": fill("network-policy.json", watch_port=_watch_port(launch)),
        "service.json": fill("service.json", port=_PORT),
    }


def _filled(template: str, name: str, role: str = "", **values: Any) -> Manifest:
    """Return a Kubernetes object from its template.

    Args:
        name: Name of the job, inserted into strings of the template.
        role: Role of the pod, inserted into strings of the template.
        values: Values of the template's other variables, inserted as JSON. An entry of the object whose
            value is None is left out.
    """
    text = files("psfleet_launch.engines.manifests").joinpath(template).read_text("utf-8")
    inserted = {key: json.dumps(value) for key, value in values.items()}
    manifest: Manifest = _without_none(
        json.loads(Template(text).substitute(inserted, name=name, role=role))
    )
    return manifest


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value if item is not None]
    return value


def job_file(items: Mapping[type, Any], strategy: Mapping[str, Any]) -> str:
    """Return a job file (TOML) with the values of some groups of settings. Default values are left out."""
    lines = {
        setting.key: value
        for group, item in items.items()
        for setting in settings_of(group)
        if setting.key and (value := getattr(item, setting.name)) != setting.default
    }
    lines |= {f"strategy.{part}": options for part, options in strategy.items()}
    return "".join(f"{key} = {_toml(value)}\n" for key, value in lines.items())


def _toml(value: Any) -> str:
    """Return a value as TOML. TOML writes strings, numbers and booleans as JSON does."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name} = {_toml(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(str(value) if isinstance(value, Path) else value, ensure_ascii=False)


def _resources(request: JobRequest, name: str, agents: int) -> Manifest | None:
    """Return the resource requests for each agent's pod, or None if the job promises no resources.

    Every pod requests the largest resources that any agent needs. Pods have no limits, because an agent may
    have to run the processes of a lost agent too.
    """
    job = Job(request, name, "", Path(), Path(_LOGS))
    machines = [f"{_AGENT} {number}" for number in range(agents)]
    needs = MachinePlacement(job, machines).largest.with_headroom
    requests = {"cpu": needs.cores, "memory": needs.memory}
    texts = {resource: str(amount) for resource, amount in requests.items() if amount}
    return {"requests": texts} if texts else None


def _launcher_job_file(
    request: JobRequest, name: str, launch: Launch, chosen: "KubernetesSettings"
) -> str:
    launch_fields = {"engine": "join", "name": name, "log_dir": Path(_LOGS)}
    in_pod = Launch(**vars(launch) | launch_fields | {"listen": f"0.0.0.0:{_PORT}"})
    join = chosen.in_cluster("/tls")
    return job_file({JobRequest: request, Launch: in_pod, type(join): join}, request.strategy)


def _watch_port(launch: Launch) -> Manifest | None:
    """Return the rule that opens the port of `--watch` to pods outside the job, or None."""
    host, _, port = launch.watch.rpartition(":")
    return {"ports": [{"port": int(port)}]} if host and port.isdigit() else None


@dataclass(frozen=True)
class KubernetesSettings(JoinSettings):
    """Settings of engine kubernetes.

    Attributes:
        render: Folder for the manifests.
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
        """Return the settings of engine join for the launcher's pod.

        Args:
            credentials: Folder with the credentials in the pod.
        """
        return JoinSettings(agents=self.agents, credentials=credentials)


class KubernetesEngine(JoinEngine):
    """Engine that only writes manifests. In the cluster the job then runs with engine join."""

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
    """Return the Secrets for the launcher's and the agents' pods, with new credentials."""
    from psfleet.core.net.connections.certificates import make_credentials  # loads cryptography

    with tempfile.TemporaryDirectory(prefix="psfleet-") as parent:
        folders = make_credentials(Path(parent) / "tls")
        texts = {
            role: {file: (folders[folder] / file).read_text() for file in FILES}
            for role, folder in _CREDENTIALS.items()
        }
    return _filled(_SECRETS, name, launcher=texts[_LAUNCHER], agent=texts[_AGENT])


def _write(folder: Path, files: Mapping[str, Manifest]) -> None:
    """Write the manifests as JSON, which is also YAML. Only the owner can read the file with the secrets.

    Raises:
        ConfigError: The folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Remove files of an earlier job with other options that this job does not have. kubectl would apply
        # them.
        for name in OPTIONAL_FILES:
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
