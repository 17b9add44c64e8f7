"""The files of a job for Kubernetes: its objects, and its credentials in a file of their own."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from psfleet.errors import ConfigError
from psfleet.wire.credentials import FILES
from psfleet_launch.engines.remote.kubernetes_objects import Manifest

__all__ = ["SECRETS", "secrets_of", "write_files"]

SECRETS = "secrets.json"


def secrets_of(name: str, credentials: Mapping[str, Path]) -> Manifest:
    """The Secrets of a job, made of the folder of each role's credentials."""
    secrets = [
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": f"{name}-{role}-tls", "labels": {"psfleet.job": name}},
            "type": "Opaque",
            "stringData": {file: (folder / file).read_text() for file in FILES},
        }
        for role, folder in credentials.items()
    ]
    return {"apiVersion": "v1", "kind": "List", "items": secrets}


def write_files(folder: Path, files: Mapping[str, Manifest]) -> None:
    """Write JSON, which is YAML too; the secrets can be read by their owner only.

    Raises:
        ConfigError: The folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            path = folder / name
            path.unlink(missing_ok=True)
            mode = 0o600 if name == SECRETS else 0o644
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
                json.dump(content, file, indent=2)
                file.write("\n")
    except OSError as error:
        raise ConfigError(
            f"--render is {str(folder)!r}, which cannot be written ({error.strerror})"
        ) from None
