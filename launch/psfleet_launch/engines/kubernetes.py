"""The platform Kubernetes: psfleet writes the files of a job, the user's kubectl applies them.

Kubernetes starts, places and restarts the processes itself, one per container; there is no launcher.
"""

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click

from psfleet.errors import ConfigError
from psfleet.wire.certificates import make_credentials
from psfleet.wire.credentials import FILES
from psfleet_launch.engines.launch_engine import Engine
from psfleet_launch.engines.remote.kubernetes_objects import Manifest, manifests
from psfleet_launch.job.job_request import JobRequest, Launch

__all__ = ["ENGINE", "KubernetesEngine"]

_SECRETS = "secrets.json"


class KubernetesEngine(Engine):
    """Writes files; it runs no process and is never made."""

    name = "kubernetes"
    spans_machines = True

    @classmethod
    def hand_over(
        cls, request: JobRequest, name: str, launch: Launch, words: Sequence[str]
    ) -> int | None:
        if not launch.render:
            raise ConfigError(
                "--engine kubernetes writes files for kubectl; name a folder for them with --render"
            )
        files = manifests(request, name, launch)
        if not launch.dry_run:
            _write(Path(launch.render), {**files, _SECRETS: _secrets(name)})
        click.echo("\n".join(f"{launch.render}/{file}" for file in sorted([*files, _SECRETS])))
        return 0


ENGINE = KubernetesEngine


def _secrets(name: str) -> Manifest:
    """New credentials of the job, those of servers and those of workers apart."""
    with tempfile.TemporaryDirectory(prefix="psfleet-") as parent:
        folders = make_credentials(Path(parent) / "tls")
        secrets = [
            {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": f"{name}-{role}-tls"},
                "type": "Opaque",
                "stringData": {file: (folder / file).read_text() for file in FILES},
            }
            for role, folder in folders.items()
        ]
    return {"apiVersion": "v1", "kind": "List", "items": secrets}


def _write(folder: Path, files: dict[str, Manifest]) -> None:
    """Write JSON, which is YAML too; the secrets can be read by their owner only.

    Raises:
        ConfigError: The folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            path = folder / name
            path.unlink(missing_ok=True)
            mode = 0o600 if name == _SECRETS else 0o644
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
                json.dump(content, file, indent=2)
                file.write("\n")
    except OSError as error:
        raise ConfigError(
            f"--render is {str(folder)!r}, which cannot be written ({error.strerror})"
        ) from None
