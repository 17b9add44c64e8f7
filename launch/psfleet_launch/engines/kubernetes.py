"""Jobs on Kubernetes: files with a pod of the launcher and pods of agents, which the user applies."""

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from typing_extensions import override

from psfleet.errors import ConfigError
from psfleet.settings.declaration import setting
from psfleet.wire.connections.credentials import FILES
from psfleet_launch.engines.join import JoinEngine, JoinSettings
from psfleet_launch.engines.remote.kubernetes_objects import (
    AGENT,
    LAUNCHER,
    OPTIONAL_FILES,
    Manifest,
    manifests,
)
from psfleet_launch.job.job_request import JobRequest, Launch

_SECRETS = "secrets.json"
_FOLDERS = {LAUNCHER: "server", AGENT: "worker"}
"""Role whose credentials each pod has."""


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
    from psfleet.wire.connections.certificates import make_credentials  # loads cryptography

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
